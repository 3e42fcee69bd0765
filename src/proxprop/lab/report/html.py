"""Small pieces of HTML: everything that is text is escaped here, everything that is a figure becomes inline SVG."""

import io
import re
from collections.abc import Iterable
from html import escape
from typing import Any

from proxprop.lab.report.tables import Table

STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; background: #f6f6f4; color: #1a1a1a; 
  font: 16px/1.55 system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 36px 40px 64px; background: #fff; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .3rem; }
h2 { font-size: 1.3rem; margin: 2.6rem 0 .4rem; padding-top: .9rem; border-top: 2px solid #1a1a1a; }
h3 { font-size: 1.02rem; margin: 1.5rem 0 .3rem; }
p { margin: .4rem 0 .8rem; max-width: 88ch; }
sub { line-height: 0; }
.lead { color: #555; margin-top: 0; }
.findings { background: #eef4f8; border-left: 5px solid #0072B2; padding: .8rem 1.2rem; margin: 1.2rem 0; }
.headline { font-size: 1.12rem; font-weight: 600; max-width: none; }
.task { font-size: 1.15rem; font-weight: 600; margin: 1.4rem 0 0; }
.findings ul { margin: .2rem 0; padding-left: 1.2rem; } .findings li { margin: .35rem 0; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; margin: .6rem 0 1.2rem; }
.wide { overflow-x: auto; }
th, td { padding: .34rem .7rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th { border-bottom: 2px solid #1a1a1a; font-weight: 600; }
th:first-child, td:first-child { text-align: left; }
.words { white-space: normal; text-align: left; }
figure { margin: .8rem 0 1.2rem; } figure svg { width: 100%; height: auto; display: block; }
figcaption { font-size: .88rem; color: #555; max-width: 110ch; }
pre { background: #f3f3f1; padding: .7rem .9rem; overflow-x: auto; font-size: .85rem; border-radius: 4px; }
code { font-family: ui-monospace, Menlo, Consolas, monospace; }
details { margin: .6rem 0; } summary { cursor: pointer; font-weight: 600; }
.note { background: #fff6e5; border-left: 5px solid #E69F00; padding: .5rem 1rem; }
@media print { body { background: #fff; font-size: 11pt; } main { padding: 0; max-width: none; }
  figure, table, .findings { break-inside: avoid; } h2, h3 { break-after: avoid; } .wide { overflow: visible; } }
"""

WHAT = (
    "ProxProp replaces a layer's gradient AᵀG by the direction of an implicit step, D = (I/τ_θ + AᵀA)⁻¹AᵀG, solved "
    "exactly or by K conjugate-gradient iterations (cgK). Model, data, optimizer and everything else stay the same."
)


def escaped(text: str) -> str:
    """Text as HTML, with τ_θ set as a letter and its index.

    >>> escaped("τ_θ < 1")
    'τ<sub>θ</sub> &lt; 1'
    """
    return escape(text).replace("τ_θ", "τ<sub>θ</sub>")


def page(title: str, body: str) -> str:
    """A whole page that needs nothing but itself."""
    body = f"{heading(title, 1)}\n{paragraph(WHAT, 'lead')}\n{body}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><main>\n{body}\n</main></body></html>\n"
    )


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph of plain text."""
    attribute = f' class="{kind}"' if kind else ""
    return f"<p{attribute}>{escaped(text)}</p>"


def heading(text: str, level: int = 2) -> str:
    """A heading."""
    return f"<h{level}>{escaped(text)}</h{level}>"


def findings_box(headline: str | None, sentences: Iterable[str]) -> str:
    """The box at the top; what stands before the first colon of a sentence is set in bold."""
    items = "".join(f"<li>{_bold_start(sentence)}</li>" for sentence in sentences)
    first = f'<p class="headline">{escaped(headline)}</p>' if headline else ""
    return f'<div class="findings">{first}<ul>{items}</ul></div>' if items or first else ""


def table(content: Table) -> str:
    """A table; long words in a cell may wrap."""
    heads = (_cell(text, index in content.words, "th") for index, text in enumerate(content.columns))
    head = "".join(heads)
    rows = (
        "".join(_cell(text, index in content.words) for index, text in enumerate(row)) for row in content.rows
    )
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def code(text: str) -> str:
    """A block of code."""
    return f"<pre><code>{escape(text)}</code></pre>"


def folded(title: str, body: str) -> str:
    """Something that opens when clicked on."""
    return f"<details><summary>{escape(title)}</summary>{body}</details>"


def figure(drawn: Any, caption: str, salt: str) -> str:
    """A matplotlib figure as inline SVG with a caption, which is its description too."""
    below = f"<figcaption>{escaped(caption)}</figcaption>"
    return f'<figure role="img" aria-label="{escape(caption)}">{svg(drawn, salt)}{below}</figure>'


def svg(drawn: Any, salt: str) -> str:
    """The SVG element of a figure. `salt` keeps the ids of several figures on one page apart and reproducible."""
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.hashsalt": salt}):
        drawn.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return _own_ids(text, salt)


def _own_ids(text: str, salt: str) -> str:
    """Prefix every id of an SVG and every reference to one, so that two SVGs on a page never share one."""
    text = re.sub(r'\bid="', f'id="{salt}-', text)
    text = re.sub(r'href="#', f'href="#{salt}-', text)
    return re.sub(r"url\(#", f"url(#{salt}-", text)


def _bold_start(sentence: str) -> str:
    start, colon, rest = sentence.partition(": ")
    return f"<b>{escaped(start)}:</b> {escaped(rest)}" if colon else escaped(sentence)


def _cell(text: str, words: bool, element: str = "td") -> str:
    kind = ' class="words"' if words else ""
    return f"<{element}{kind}>{escaped(text)}</{element}>"
