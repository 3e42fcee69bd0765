"""Puts every figure of a page into a box of its own, so that a phone can scroll it at a size that can be read."""

from docutils import nodes
from sphinx.application import Sphinx
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


def setup(app: Sphinx) -> dict[str, bool]:
    """Look at each page when it has been read."""
    app.connect("doctree-read", put_into_boxes)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
