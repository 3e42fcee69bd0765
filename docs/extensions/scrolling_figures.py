"""Puts every figure of a page into a box of its own, so that a phone can scroll it at a size that can be read.

A picture is also a link to itself, which a browser then shows at its full size.
"""

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.osutil import relative_uri
from sphinx_gallery.directives import imgsgnode

BOX = "scrolling-figure"
"""The class of a box; `static/site.css` says what it looks like."""


def put_into_boxes(app: Sphinx, document: nodes.document) -> None:
    """Box the figures of the gallery's pages and those that stand alone in a paragraph or a section."""
    figures = list(document.findall(lambda node: isinstance(node, (nodes.image, imgsgnode))))
    for figure in figures:
        alone = isinstance(figure.parent, nodes.paragraph) and len(figure.parent) == 1
        if alone or isinstance(figure.parent, nodes.section):
            outer = figure.parent if alone else figure
            box = nodes.container("", figure.deepcopy(), classes=[BOX])
            outer.replace_self(box)


def link_to_full_size(app: Sphinx, document: nodes.document, page: str) -> None:
    """Make the picture in each box a link to its file."""
    if app.builder.format != "html":
        return
    boxes = document.findall(lambda node: isinstance(node, nodes.container) and BOX in node["classes"])
    for picture in [image for box in boxes for image in box.findall(nodes.image)]:
        file = app.env.images[picture["uri"]][1]
        address = relative_uri(app.builder.get_target_uri(page), f"{app.builder.imagedir}/{file}")
        picture.replace_self(nodes.reference("", "", picture.deepcopy(), refuri=address, internal=True))


def setup(app: Sphinx) -> dict[str, bool]:
    """Look at each page when it has been read, and when its pictures have names."""
    app.connect("doctree-read", put_into_boxes)
    app.connect("doctree-resolved", link_to_full_size)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
