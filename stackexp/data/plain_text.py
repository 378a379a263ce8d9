"""Convert the files of manuals, dictionaries and books to plain text: paragraphs separated by blank lines.

A paragraph is one line; code keeps its lines. Long code, tables, markup, navigation, and lines that are mostly digits
or symbols are left out.
"""

import gzip
import itertools
import re
import struct
import unicodedata
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

GROUPED_CHARACTERS = 4000  # short entries of a dictionary are joined to documents of about this size
MAX_CODE_LINES = 12
MIN_LETTERS, MIN_CODE_LETTERS = 0.75, 0.6  # share of letters and spaces in a paragraph, in code
LISTED_CHARACTERS, MAX_LISTED = 30, 5  # a longer run of such short paragraphs is a list of names or links
CHECKED_CHARACTERS = 30  # shorter paragraphs, such as headings, need a single letter
BREAK, CODE = "\ue000", "\ue001"  # between two blocks; at the start of code
NOTICE = re.compile(r"(copyright\b|©|\(c\) [12]\d{3}|all rights reserved|licensed under|spdx-)", re.IGNORECASE)
INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u2028\u2029\u2060\ufeff\ue000-\uf8ff\ufffd¶]")

MAIN_PARTS = ("//*[@role='main']", "//main", "//*[@id='page-content' or @id='DisplayArea']")
DROPPED_TAGS = {
    *("script", "style", "nav", "header", "footer", "form", "select", "button", "svg", "math", "img", "noscript"),
    *("head", "info", "links", "media", "comment", "figure"),  # from info on, Mallard's
}
DROPPED_CLASSES = re.compile(
    r"\b(nav|nav\w*|toc|toctree-wrapper|contents|sphinxsidebar\w*|related|headerlink|footer|header|path|lang\w*|book-nav\w*|"
    r"quickview|breadcrumbs?|wy-breadcrumbs.*|menu|index|mini-toc|short-contents|node-up-expansion|sidebar\w*|"
    r"copyright|legalnotice|viewcode-link|docnav|footnote_back|tindex|footinfo|node)\b"
)
DROPPED_IDS = re.compile(r"\b(toc\w*|nav\w*|sidebar\w*|footer|header|menu|quickview|breadcrumbs|topnav|comments?\w*)\b")
BLOCKS = {
    *("p", "div", "section", "article", "li", "ul", "ol", "dl", "dt", "dd", "table", "tr", "td", "th", "blockquote"),
    *("h1", "h2", "h3", "h4", "h5", "h6", "hr", "pre", "body", "center", "caption", "title", "item", "screen", "note"),
    *("para", "listitem", "term", "programlisting", "steps", "list", "page", "synopsis", "verse", "chapter", "desc"),
}
CODE_TAGS = ("pre", "screen", "programlisting")


def to_documents(data: bytes, kind: str) -> Iterator[str]:
    """Yield the documents of a file as plain text. `kind` is a key of READERS; a gzip file is decompressed."""
    if data.startswith(b"\x1f\x8b"):
        data = gzip.decompress(data)
    for blocks in READERS[kind](data):
        if text := "\n\n".join(_drop_lists(filter(None, map(_clean_block, blocks)))):
            yield text


def _drop_lists(paragraphs: Iterable[str]) -> Iterator[str]:
    """Drop runs of many short paragraphs, such as lists of names and links."""
    for is_short, run in itertools.groupby(paragraphs, lambda paragraph: len(paragraph) < LISTED_CHARACTERS):
        members = list(run)
        if not is_short or len(members) <= MAX_LISTED:
            yield from members


def decode(data: bytes) -> str:
    """Decode UTF-8, or else Windows-1252."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode("cp1252", errors="replace")


def _clean_block(block: str) -> str:
    """Return a paragraph on one line, or code with its lines; empty if it is not text."""
    is_code = block.startswith(CODE)
    text = INVISIBLE.sub("", unicodedata.normalize("NFC", block.lstrip(CODE)).replace("\xa0", " "))
    if is_code:
        text = "\n".join(line.expandtabs().rstrip() for line in text.strip("\n").splitlines())
        if text.count("\n") >= MAX_CODE_LINES:
            return ""
        text = re.sub(r"\n\s*\n", "\n", text)  # a blank line separates paragraphs
    else:
        text = " ".join(text.split())
    if not any(map(str.isalpha, text)) or any(unicodedata.category(c) == "Cc" and c != "\n" for c in text):
        return ""
    letters = sum(c.isalpha() or c.isspace() for c in text) / len(text)
    if len(text) >= CHECKED_CHARACTERS and letters < (MIN_CODE_LETTERS if is_code else MIN_LETTERS):
        return ""
    return "" if len(text) < 400 and NOTICE.match(text) else text


def _split_paragraphs(text: str) -> list[str]:
    return re.split(r"\n\s*\n", text)


# Markup


def read_html(data: bytes) -> Iterator[list[str]]:
    """Read an HTML page without its navigation."""
    from lxml import etree, html

    text = re.sub(r"^\s*<\?xml[^>]*\?>", "", decode(data))
    if not text.strip():
        return
    try:
        tree = html.fromstring(text, parser=html.HTMLParser(remove_comments=True, remove_pis=True))
    except etree.ParserError:  # a page without an element
        return
    yield _list_blocks(next((found[0] for path in MAIN_PARTS if (found := tree.xpath(path))), tree))


def read_xml(data: bytes) -> Iterator[list[str]]:
    """Read a page of Mallard or DocBook."""
    from lxml import etree

    parser = etree.XMLParser(
        remove_comments=True, remove_pis=True, recover=True, resolve_entities=False, no_network=True
    )
    tree = etree.fromstring(data, parser)
    if tree is not None:
        for element in tree.iter(etree.Element):
            element.tag = etree.QName(element).localname
        yield _list_blocks(tree)


def _list_blocks(root: Any) -> list[str]:
    """Return the text of an element tree, split at its block elements."""
    from lxml import etree

    for element in list(root.iter(etree.Element)):
        if element is not root and _is_dropped(element):
            _remove(element)
        elif element.tag in CODE_TAGS:
            code, tail = "".join(element.itertext()), element.tail
            element.clear()
            element.text, element.tail = CODE + code, tail
    parts: list[str] = []
    for event, element in etree.iterwalk(root, ("start", "end")):
        is_block = element.tag in BLOCKS
        if event == "start":
            parts += [BREAK if is_block else "", " " if element.tag == "br" else "", element.text or ""]
        else:
            parts += [BREAK if is_block else "", (element.tail or "") if element is not root else ""]
    return "".join(parts).split(BREAK)


def _is_dropped(element: Any) -> bool:
    """Return True for navigation, pictures, and short table cells, which are rarely sentences."""
    if element.tag in DROPPED_TAGS or DROPPED_IDS.fullmatch(element.get("id", "")):
        return True
    if element.get("role") == "navigation" or any(map(DROPPED_CLASSES.fullmatch, element.get("class", "").split())):
        return True
    is_cell = element.tag in ("td", "th") and element.find(".//p") is None
    return is_cell and len("".join(element.itertext())) < 80


def _remove(element: Any) -> None:
    parent, previous, tail = element.getparent(), element.getprevious(), element.tail or ""
    if parent is None:
        return
    if previous is not None:
        previous.tail = (previous.tail or "") + " " + tail
    else:
        parent.text = (parent.text or "") + " " + tail
    parent.remove(element)


ROFF_CHARACTERS = {
    **{"aq": "'", "dq": '"', "em": "—", "en": "\u2013", "bu": "•", "lq": "“", "rq": "”", "oq": "\u2018", "ga": "`"},
    **{"cq": "\u2019", "ti": "~", "ha": "^", "rs": "\\", "mu": "\u00d7", "<=": "≤", ">=": "≥", "->": "→", "hy": "-"},
    **{"!=": "≠", "lB": "[", "rB": "]", "*m": "µ", "+-": "±", "bv": "|", "tm": "™", "de": "°", "if": "∞", "pi": "π"},
    **{"sr": "√", "co": "©"},
}
ROFF_ESCAPES = (
    (re.compile(r"\\\".*"), ""),
    (re.compile(r"\\f(\[\w*\]|\(\w\w|\w)|\\s[-+]?\d|\\[&|^/,%:)c~]|\\n\[?\w+\]?|\\[mv]'[^']*'|\\h'[^']*'"), ""),
    (
        re.compile(r"\\(?:\((..)|\[(\w+)\]|\*\((..)|\*(.))"),
        lambda match: ROFF_CHARACTERS.get(match[match.lastindex], ""),
    ),
    (re.compile(r"\\-"), "-"),
    (re.compile(r"\\ "), " "),
    (re.compile(r"\\e"), r"\\"),
    (re.compile(r"\\([.'`])"), r"\1"),
)
ROFF_DROPPED = (
    *("TH", "so", "TS", "ad", "hy", "in", "de", "ie", "if", "el", "RS", "RE", "ft", "ta", "ne", "nr", "UE", "ME"),
)


def read_man(data: bytes) -> Iterator[list[str]]:
    """Read a manual page with the macros of man(7)."""
    blocks, code, table = [""], False, False
    for line in decode(data).replace("\\\n", "").splitlines():
        if table or line.startswith((".TS", ".EQ")):
            table = not line.startswith((".TE", ".EN"))
            continue
        macro, text = "", line
        if line.startswith((".", "'")):
            macro, _, text = line[1:].lstrip().partition(" ")
            if not macro or macro.startswith('\\"') or macro in ROFF_DROPPED:
                continue
            words = [quoted or word for quoted, word in re.findall(r'"([^"]*)"?|(\S+)', text)]
            text = ("" if len(macro) == 2 and set(macro) <= set("BIR") else " ").join(words)
            text = words[0] if macro == "IP" and words else text
        for pattern, replacement in ROFF_ESCAPES:
            text = pattern.sub(replacement, text)
        if macro in ("nf", "EX", "fi", "EE"):
            code = macro in ("nf", "EX")
            blocks.append(CODE if code else "")
        elif macro in ("SH", "SS", "IP"):
            blocks += [text, ""]
        elif not code and (macro in ("PP", "P", "LP", "TP", "HP", "TQ", "sp", "br") or not text.strip()):
            blocks.append("")
        else:
            blocks[-1] += text + "\n"
    yield blocks


def read_pod(data: bytes) -> Iterator[list[str]]:
    """Read Perl's documentation format."""
    blocks, hidden = [], False
    for paragraph in re.split(r"\n[ \t]*\n", decode(data)):
        command = re.match(r"=(\w+)\s*(.*)", paragraph.lstrip("\n"), re.DOTALL)
        if command:
            hidden = command[1] in ("begin", "for", "encoding", "cut") or (hidden and command[1] not in ("end", "pod"))
            if command[1] in ("head1", "head2", "head3", "head4", "item"):
                hidden = False
                blocks.append(command[2].removeprefix("*"))
        elif not hidden and paragraph.lstrip("\n").startswith((" ", "\t")):
            if blocks and blocks[-1].startswith(CODE):
                blocks[-1] += "\n\n" + paragraph
            else:
                blocks.append(CODE + paragraph)
        elif not hidden:
            blocks.append(paragraph)
    yield [block if block.startswith(CODE) else _strip_pod_codes(block) for block in blocks]


def _strip_pod_codes(text: str) -> str:
    names = {"E<lt>": "<", "E<gt>": ">", "E<sol>": "/", "E<verbar>": "|"}
    text = re.sub(r"[XZ]<[^<>]*>", "", text)
    for _ in range(4):  # codes are nested
        text = re.sub(r"L<(?:([^<>|]*)\|)?([^<>]*)>", lambda match: match[1] or match[2].strip("/"), text)
        text = re.sub(
            r"[BCFIS](?:<<+ (.*?) >>+|<([^<>]*)>)", lambda match: match[1] or match[2] or "", text, flags=re.S
        )
        text = re.sub(r"E<(lt|gt|sol|verbar)>", lambda match: names[match[0]], text)
    return re.sub(r"E<\w+>", "", text)


def read_info(data: bytes) -> Iterator[list[str]]:
    """Read an Info file without menus, indices and underlines."""
    for node in decode(data).split("\x1f")[1:]:
        header, _, text = node.lstrip("\n").partition("\n")
        if not header.startswith("File:") or "Index" in header:
            continue
        text = re.sub(r"^\* Menu:.*", "", text, flags=re.MULTILINE | re.DOTALL)
        text = re.sub(r"^[*=.-]{3,}$", "", text, flags=re.MULTILINE)
        text = re.sub(r"\*[Nn]ote ([^:.]+)::?", r"\1", text)
        blocks = [block for block in _split_paragraphs(text) if not block.lstrip().startswith("(%")]
        yield [CODE + block if re.match(r"\n* {9,}", block) else block for block in blocks]


# Text


def read_text(data: bytes) -> Iterator[list[str]]:
    """Read text whose paragraphs are separated by blank lines, without columns."""
    yield [paragraph for paragraph in _split_paragraphs(decode(data)) if not _has_columns(paragraph)]


def _has_columns(paragraph: str) -> bool:
    """Return True if a third of the lines have gaps, as in tables and drawings."""
    lines = paragraph.splitlines()
    return 3 * sum(re.search(r"\S(\t| {3,})\S", line) is not None for line in lines) >= len(lines)


def read_vim(data: bytes) -> Iterator[list[str]]:
    """Read Vim's help without the marks of its tags and links."""
    text = re.sub(r"(^|\s)\*[^\s*]+\*(?=\s|$)", r"\1", decode(data))
    text = re.sub(r"\|([^\s|]+)\|", r"\1", text)
    yield from read_text(re.sub(r" [>~]$|^<", "", text, flags=re.MULTILINE).encode())


def read_fortunes(data: bytes) -> Iterator[list[str]]:
    """Read the quotations of a fortune file."""
    yield from _group([" ".join(item.split())] for item in re.split(r"^%$", decode(data), flags=re.MULTILINE))


def read_dict(data: bytes) -> Iterator[list[str]]:
    """Read a dictionary of dictd, whose entries begin at the left margin."""
    yield from _group(_split_paragraphs(re.sub(r"[{}]", "", entry)) for entry in _split_entries(data))


def read_gcide(data: bytes) -> Iterator[list[str]]:
    """Read GCIDE without its entries from WordNet, pronunciations and source tags."""
    entries = (entry for entry in _split_entries(data) if "WordNet" not in entry)
    yield from _group(_split_paragraphs(_clean_gcide(entry)) for entry in entries)


def _split_entries(data: bytes) -> list[str]:
    entries = re.split(r"\n\n+(?=\S)", decode(data))
    return [entry for entry in entries if not entry.startswith("00-database")]


def _clean_gcide(text: str) -> str:
    text = re.sub(r"\\[^\\\n]*\\(\s*\([^()]*\))?", "", text)  # the pronunciation
    text = re.sub(r"\[(1913 Webster|PJC|[A-Z]\w*\. 1913|Webster[^\]]*|\w+)( \+PJC)?\]", "", text)
    text = re.sub(r"\[[^\w\]]([a-zA-Z])\]|\[([a-zA-Z])[^\w\].]\]|\[([ao]e)\]", r"\1\2\3", text)  # letters with accents
    text = re.sub(r"\[[^\]]*\]", "", text)  # etymologies
    return re.sub(r"[{}]", "", text).replace(" ,", ",")


def read_wordnet(data: bytes) -> Iterator[list[str]]:
    """Read the glosses of a WordNet data file, each with the words that it explains."""
    lines = (line for line in decode(data).splitlines() if not line.startswith("  "))
    yield from _group([_format_gloss(line)] for line in lines)


def _format_gloss(line: str) -> str:
    fields, _, gloss = line.partition(" | ")
    words = fields.split(" ")
    names = [re.sub(r"\(\w+\)$", "", word).replace("_", " ") for word in words[4 : 4 + 2 * int(words[3], 16) : 2]]
    return f"{', '.join(names)}: {gloss.strip()}"


def _group(entries: Iterable[list[str]]) -> Iterator[list[str]]:
    """Join short entries to documents of about GROUPED_CHARACTERS."""
    blocks: list[str] = []
    for entry in entries:
        blocks += entry
        if sum(map(len, blocks)) >= GROUPED_CHARACTERS:
            yield blocks
            blocks = []
    yield blocks


def read_sword(data: bytes) -> Iterator[list[str]]:
    """Read the compressed blocks of a SWORD module, in OSIS markup without a root element."""
    position = data.find(b"x\x9c")
    while position >= 0:
        stream = zlib.decompressobj()
        try:
            block = stream.decompress(data[position:])
        except zlib.error:  # these two bytes were not a block's start
            position = data.find(b"x\x9c", position + 1)
            continue
        position = data.find(b"x\x9c", len(data) - len(stream.unused_data)) if stream.unused_data else -1
        text = re.sub(r"<note.*?</note>", "", decode(block), flags=re.DOTALL)
        text = re.sub(r"</?(p|div|title|lg|list|item|chapter)\b[^>]*>", BREAK, text)
        text = re.sub(r"<(/l|lb)\b[^>]*>", " ", text)
        text = re.sub(r"<[^>]*>", "", text)
        text = text.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", '"').replace("&amp;", "&")
        yield text.split(BREAK)


def read_r_strings(data: bytes) -> Iterator[list[str]]:
    """Read the lines of text in an R database (.rdb): zlib blocks, each a vector of strings in R's XDR format."""
    while data:
        stream = zlib.decompressobj()
        values = stream.decompress(data[4:])
        data = stream.unused_data
        lines, position = [], values.find(b"\x00\x04\x00\x09")
        while 0 <= position < len(values):
            flags, size = struct.unpack(">Ii", values[position : position + 8].ljust(8, b"\0"))
            if flags & 0xFF != 9:  # not a string: the vector has ended
                break
            lines.append(decode(values[position + 8 : position + 8 + max(0, size)]))
            position += 8 + max(0, size)
        if len(lines) > 100:  # not the index of the database
            yield _split_paragraphs("\n".join(lines))


READERS: dict[str, Callable[[bytes], Iterator[list[str]]]] = {
    **{"html": read_html, "xml": read_xml, "man": read_man, "pod": read_pod, "info": read_info, "text": read_text},
    **{"vim": read_vim, "fortunes": read_fortunes, "dict": read_dict, "gcide": read_gcide, "wordnet": read_wordnet},
    **{"sword": read_sword, "r": read_r_strings},
}
