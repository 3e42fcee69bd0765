"""Look at the built site: `python docs/extensions/check_site.py out/site`.

Every internal link, image and anchor resolves, no page fetches anything from a network, no page names a folder of the
machine that built it, every public name is described, and no attribute's description was taken for its type.
"""

import re
import sys
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from modules_described import anchors

CHECKOUT = Path(__file__).resolve().parents[2]


TYPED = re.compile(
    r'<dt class="field-\w+">(?:Type|Return type)<span class="colon">:</span></dt>\s*'
    r'<dd class="field-\w+"><p>([^<]*)'
)
"""A docstring with a colon in the first line of an attribute or of Returns, where Napoleon expects a type before it."""


class Link(NamedTuple):
    """An address in a page, and whether a browser fetches it without being asked."""

    address: str
    fetched: bool


class Page(HTMLParser):
    """The anchors and links of one page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.text = path, path.read_text()
        self.anchors: set[str] = set()
        self.links: list[Link] = []
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what the tag is called and what it points to."""
        found = dict(attrs)
        self.anchors |= {value for name in ("id", "name") if (value := found.get(name))}
        for name in ("href", "src", "data"):
            if (address := found.get(name)) and not (tag == "object" and name == "href"):
                self.links.append(Link(address, fetched=tag != "a"))


def problems(root: Path, machine: Iterable[str] = (), names: Iterable[str] = ()) -> Iterator[str]:
    """What is wrong with the site in a folder, one sentence each.

    Args:
        root: the folder.
        machine: folders of this machine, which no page should name.
        names: anchors that some page should have.
    """
    pages = {path: Page(path) for path in sorted(root.resolve().rglob("*.html"))}
    if not pages:
        yield f"{root}: there is no page"
    for path, page in pages.items():
        where = path.relative_to(root.resolve())
        yield from (f"{where}: {problem}" for link in page.links for problem in broken(page, link, pages))
        yield from (f"{where}: names {folder}" for folder in machine if folder in page.text)
        yield from (
            f"{where}: took the start of a docstring for a type: {words!r}"
            for words in TYPED.findall(page.text)
        )
    for path in sorted(root.rglob("*.css")):
        for address in re.findall(r"url\(['\"]?(https?:[^)'\"]+)", path.read_text()):
            yield f"{path.name}: fetches {address}"
    described = set().union(*(page.anchors for page in pages.values())) if pages else set()
    yield from (f"{name} is public, and no page describes it" for name in sorted(set(names) - described))


def broken(page: Page, link: Link, pages: dict[Path, Page]) -> Iterator[str]:
    """What is wrong with one link."""
    parts = urlsplit(link.address)
    if parts.scheme or parts.netloc:
        if link.fetched and parts.scheme != "data":
            yield f"fetches {link.address}"
        return
    target = (page.path.parent / unquote(parts.path)).resolve() if parts.path else page.path
    target = target / "index.html" if target.is_dir() else target
    if not target.exists():
        yield f"{link.address} leads nowhere"
    elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
        yield f"{link.address} has no such anchor"


def main() -> None:
    """Say what is wrong, and leave with 1 if anything is."""
    root = Path(sys.argv[1])
    found = list(problems(root, machine=(str(CHECKOUT), sys.prefix, str(Path.home())), names=anchors()))
    print("\n".join(found) or f"{root}: links, images, anchors and public names are all there")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
