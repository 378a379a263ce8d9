"""Plain text of each format: no markup, navigation, tables of digits or long code."""

import gzip
import struct
import zlib

import pytest

from stackexp.data.plain_text import MAX_CODE_LINES, READERS, to_documents

SENTENCE = "The lock is held until the last reader has left the list."
HTML = """<?xml version="1.0" encoding="utf-8"?>
<html><head><title>Locks</title><style>p {}</style></head><body>
<div class="navheader"><a>Next</a></div><div role="main">
<h1>Locks<a class="headerlink" href="#">¶</a></h1>
<p>The <em>lock</em> is held\n   until the last&nbsp;reader has left the list.</p>tail of a block
<ul><li>one item<!-- hidden --></li></ul>
<pre>lock(list);\n\nunlock(list);</pre>
<table><tr><td>0xff</td><td>short cell</td></tr><tr><td><p>A sentence in a cell.</p></td></tr></table>
<p>00 01 02 03 04 05 06 07 08 09 0a 0b 0c 0d 0e 0f</p><p>Copyright 2020 by nobody.</p>
<script>alert(1)</script></div><div class="footer">Next page</div></body></html>"""
MALLARD = """<page xmlns="http://projectmallard.org/1.0/"><info><desc>hidden</desc></info><title>Locks</title>
<p>The <gui>lock</gui> is held.</p><steps><item><p>Open it.</p></item></steps></page>"""
MAN = r""".\" A comment
.TH lock 2 2020-01-01 "Linux"
.SH NAME
lock \- hold a list
.SH DESCRIPTION
The
.BR \
lock ()
is held by \fIthe last\fP reader,
.RI ( list ", " \-1 ).
.PP
It isn\(aqt free.
.EX
a = lock();

b = 1;
.EE
.TS
lb l.
cell	cell
.TE
.TP
.B LOCK_EX
An exclusive lock.
"""
POD = """=head1 NAME

X<lock>perllock - locks of B<C<Perl>>

=over 4

=item * flock

See L<the manual|perlfunc/flock> and L<perlipc>, where a E<lt> b, F<< /etc/x >>.

    my $x = 1;

    lock($x);

=back

=begin html

<b>hidden</b>

=end html

=cut
"""
INFO = """This is maxima.info

\x1f
File: maxima.info,  Node: Locks,  Next: Keys

1 Locks
*******

The lock is held, *note Keys::.

* Menu:

* Keys::
\x1f
File: maxima.info,  Node: Index

* lock: Locks.
"""
DICT = (
    "00-database-info\n   about\n\nlock\n\n   A device. See {key}.\n\nlock picking\nLP\n\n   The art of opening it.\n"
)
GCIDE = """Lock \\Lock\\ (l[o^]k), n. [AS. loc inclosure.]
   1. A fastening, as for a {door}. [R.] --Spenser.
      [1913 Webster]

Locker \\Lock"er\\, n.
   A closed place. [WordNet 1.5]
"""
WORDNET = (
    "  1 This software is licensed\n"
    '00001740 06 n 02 lock 0 door_lock(a) 1 002 @ 03 n 0000 | a fastener; "he turned the lock"  \n'
)
OSIS = '<div type="chapter"><p>In the beginning<note>hidden</note> was the <w lemma="x">word</w> &amp; so on.</p></div>'
EXPECTED = {
    "html": [
        *("Locks", SENTENCE, "tail of a block", "one item", "lock(list);\nunlock(list);", "A sentence in a cell."),
    ],
    "xml": ["Locks", "The lock is held.", "Open it."],
    "man": [
        *("NAME", "lock - hold a list", "DESCRIPTION", "The lock() is held by the last reader, (list, -1)."),
        *("It isn't free.", "a = lock();\nb = 1;", "LOCK_EX An exclusive lock."),
    ],
    "pod": [
        *("NAME", "perllock - locks of Perl", "flock", "See the manual and perlipc, where a < b, /etc/x."),
        "    my $x = 1;\n    lock($x);",
    ],
    "info": ["1 Locks", "The lock is held, Keys."],
    "text": ["One paragraph.", "Another one."],
    "vim": ["Locks", "See :lock for more."],
    "fortunes": ["A quotation. -- A. Nonymous", "Another."],
    "dict": ["lock", "A device. See key.", "lock picking LP", "The art of opening it."],
    "gcide": ["Lock, n. 1. A fastening, as for a door. --Spenser."],
    "wordnet": ['lock, door lock: a fastener; "he turned the lock"'],
    "sword": ["In the beginning was the word & so on."],
    "r": ["EMMA", "By Jane Austen handsome, clever and rich."],
}


def make_r_strings(lines: list[str]) -> bytes:
    """Return the block of an R database with one vector of strings."""
    values = b"X\n" + struct.pack(">iiii", 3, 0, 0, 16) + struct.pack(">i", len(lines))
    values += b"".join(struct.pack(">Ii", 0x00040009, len(line)) + line.encode() for line in lines)
    return struct.pack(">I", len(values)) + zlib.compress(values + struct.pack(">I", 0x00000402))


CONTENTS = {
    "html": HTML.encode(),
    "xml": MALLARD.encode(),
    "man": gzip.compress(MAN.encode()),
    "pod": POD.encode(),
    "info": INFO.encode(),
    "text": b"One\nparagraph.\n\nAnother one.\n\nname    size    date\na       1       2020\n",
    "vim": b"*lock.txt*  Locks ~\n\nSee |:lock| for more. >\n",
    "fortunes": b"A quotation.\n\t\t-- A. Nonymous\n%\nAnother.\n",
    "dict": DICT.encode(),
    "gcide": GCIDE.encode(),
    "wordnet": WORDNET.encode(),
    "sword": b"garbage" + zlib.compress(OSIS.encode()),
    "r": make_r_strings(["EMMA", "", "By Jane Austen", "handsome, clever", "and rich."] + [""] * 100),
}


@pytest.mark.parametrize("kind", READERS)
def test_each_format_becomes_paragraphs(kind):
    documents = list(to_documents(CONTENTS[kind], kind))
    assert [document.split("\n\n") for document in documents] == [EXPECTED[kind]]


def test_long_code_and_lists_of_names_are_left_out():
    code = "<pre>{}</pre>".format("call();\n" * (MAX_CODE_LINES + 1))
    names = [f"<li>name_{letter}</li>" for letter in "abcdef"]
    assert list(to_documents(f"<p>{SENTENCE}</p>{code}<ul>{''.join(names)}</ul>".encode(), "html")) == [SENTENCE]
    few = "".join(names[:3])
    expected = "\n\n".join([SENTENCE, "name_a", "name_b", "name_c"])
    assert list(to_documents(f"<p>{SENTENCE}</p><ul>{few}</ul>".encode(), "html")) == [expected]


def test_other_encodings_are_decoded():
    assert list(to_documents("Een café in Zürich.".encode("cp1252"), "text")) == ["Een café in Zürich."]


@pytest.mark.parametrize("data", [b"", b"<!-- nothing -->", b"<?xml version='1.0'?>"])
def test_an_empty_page_has_no_document(data):
    assert list(to_documents(data, "html")) == []
