"""Small pieces of HTML: everything that is text is escaped here, everything that is a figure becomes inline SVG."""

import io
import re
from collections.abc import Iterable
from html import escape
from typing import Any

from proxprop.lab.report.tables import Table

STYLE = """
:root { color-scheme: only light; }
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
table { border-collapse: separate; border-spacing: 0; font-size: .88rem; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; } .table { margin: .6rem 0 1.2rem; }
th, td { padding: .34rem .7rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
thead th { border-bottom: 2px solid #1a1a1a; font-weight: 600; } tbody th { font-weight: inherit; }
th:first-child { text-align: left; }
.words { white-space: normal; text-align: left; }
figure { margin: .8rem 0 1.2rem; } figure svg { width: 100%; height: auto; display: block; }
.hint { display: none; }
figcaption { font-size: .88rem; color: #555; max-width: 110ch; }
pre { background: #f3f3f1; padding: .7rem .9rem; overflow-x: auto; font-size: .85rem; border-radius: 4px; }
code { font-family: ui-monospace, Menlo, Consolas, monospace; }
details { margin: .6rem 0; } summary { cursor: pointer; font-weight: 600; }
.note { background: #fff6e5; border-left: 5px solid #E69F00; padding: .5rem 1rem; }
@media screen and (max-width: 800px) {
  main { padding: 20px 16px 40px; } pre { white-space: pre-wrap; overflow-wrap: anywhere; }
  figure svg { min-width: 720px; }
  .hint { display: block; margin: 0; font-size: .8rem; color: #555; }
  .table { background:
    linear-gradient(to left, #fff 40%, #fff0) right / 48px 100% no-repeat local,
    linear-gradient(to left, #0004, #0000) right / 16px 100% no-repeat scroll; }
  .table th:first-child { position: sticky; left: 0; background: #fff; white-space: normal; min-width: 7.5rem; }
}
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


def table(content: Table, name: str) -> str:
    """A table under a name for screen readers; its first column names the rows, and long words in a cell may wrap."""
    head = "".join(_cell(text, index in content.words, "col") for index, text in enumerate(content.columns))
    rows = (
        "".join(
            _cell(text, index in content.words, None if index else "row") for index, text in enumerate(row)
        )
        for row in content.rows
    )
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    inside = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return _sideways(inside, name, "wide table")


def code(text: str) -> str:
    """A block of code."""
    return f"<pre><code>{escape(text)}</code></pre>"


def folded(title: str, body: str) -> str:
    """Something that opens when clicked on."""
    return f"<details><summary>{escape(title)}</summary>{body}</details>"


def figure(drawn: Any, caption: str, description: str, salt: str) -> str:
    """A matplotlib figure as inline SVG with a caption, and a description for those who cannot see it."""
    picture = f'<svg role="img" aria-label="{escape(description)}"{svg(drawn, salt).removeprefix("<svg")}'
    hint = '<p class="hint">Swipe sideways to see the whole figure →</p>'
    below = f"<figcaption>{escaped(caption)}</figcaption>"
    return f"<figure>{hint}{_sideways(picture, 'The figure, which scrolls sideways')}{below}</figure>"


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


def _sideways(inside: str, name: str, kind: str = "wide") -> str:
    """Something that scrolls sideways where it does not fit, by touch and by keyboard."""
    return f'<div class="{kind}" tabindex="0" role="region" aria-label="{escape(name)}">{inside}</div>'


def _cell(text: str, words: bool, scope: str | None) -> str:
    """A cell; a scope says what it heads: its column or its row."""
    kind = ' class="words"' if words else ""
    return f'<th scope="{scope}"{kind}>{escaped(text)}</th>' if scope else f"<td{kind}>{escaped(text)}</td>"
