"""Best-fit packing: sequences that cut as few documents as possible (Ding et al. 2024, arXiv 2404.10830).

Concatenation cuts a document wherever a sequence ends. Here, a document that fits into a sequence goes whole into the
sequence with the least space that still holds it, the longest documents first. A longer document gives whole sequences
and a remainder. Remainders fill the space that is left, so every sequence is full and there is no padding. If there are
too few remainders, the emptiest sequences are cut up to fill the others.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from typing import Literal

import numpy as np

Packing = Literal["concatenate", "best_fit"]

WINDOW_TOKENS = 1 << 22  # tokens of documents that are packed together


class BestFitPacker:
    """Packs a stream of tokens, whose documents end with the id `end`, into sequences of `length` tokens.

    Each sequence [length] is passed to `write_sequence`. Documents are packed in windows of WINDOW_TOKENS, however the
    stream is divided into calls.

    Attributes:
        cut: The number of documents that are cut, that is, in more than one sequence.
        cut_by_concatenation: The number of documents that concatenation would cut.
    """

    def __init__(self, write_sequence: Callable[[np.ndarray], None], length: int, end: int) -> None:
        self._write_sequence, self._length, self._end = write_sequence, length, end
        self._unfinished: list[np.ndarray] = []  # the parts of the document that has not ended
        self._documents: list[np.ndarray] = []
        self._size = self._position = 0  # tokens in `_documents`, and in all documents so far
        self._pieces: deque[tuple[np.ndarray, bool]] = deque()  # not written yet; True: a whole document
        self._left = 0  # tokens in `_pieces`
        self.cut = self.cut_by_concatenation = 0

    def write(self, tokens: np.ndarray) -> None:
        """Append tokens [N]."""
        *ended, rest = np.split(tokens, np.flatnonzero(tokens == self._end) + 1)
        for part in ended:
            self._add(np.concatenate([*self._unfinished, part]))
            self._unfinished = []
        if len(rest):
            self._unfinished.append(rest)

    def close(self) -> np.ndarray:
        """Pack what is left, and return the tokens that do not fill a sequence."""
        if self._unfinished:
            self._add(np.concatenate(self._unfinished))
        self._pack()
        return np.concatenate([np.empty(0, np.int64), *(piece for piece, _ in self._pieces)])

    def _add(self, document: np.ndarray) -> None:
        begin, self._position = self._position, self._position + len(document)
        self.cut_by_concatenation += begin // self._length != (self._position - 1) // self._length
        self._documents.append(document)
        self._size += len(document)
        if self._size >= WINDOW_TOKENS:
            self._pack()

    def _pack(self) -> None:
        """Write the documents of the window; fewer than `length` tokens stay in `_pieces`."""
        short = [piece for piece, is_whole in self._pieces if is_whole]
        cut = [piece for piece, is_whole in self._pieces if not is_whole]
        self._pieces, self._left = deque(), 0
        self._add_pieces(cut, False)
        for document in self._documents:
            whole = len(document) - len(document) % self._length if len(document) > self._length else 0
            for sequence in document[:whole].reshape(-1, self._length):
                self._write_sequence(sequence)
            if whole == 0:
                short.append(document)
            elif whole < len(document):
                self._add_pieces([document[whole:]], False)
            self.cut += whole > 0
        self._documents, self._size = [], 0
        groups = deque(fit_best(short, self._length))
        while groups:
            group = groups.popleft()
            space = self._length - sum(map(len, group))
            while groups and self._left < space:
                self._add_pieces(groups.pop(), True)
            if self._left < space:
                self._add_pieces(group, True)
            else:
                self._write_sequence(np.concatenate([*group, *self._take(space)]))
        while self._left >= self._length:
            self._write_sequence(np.concatenate(self._take(self._length)))

    def _add_pieces(self, pieces: list[np.ndarray], is_whole: bool) -> None:
        self._pieces += [(piece, is_whole) for piece in pieces]
        self._left += sum(map(len, pieces))

    def _take(self, count: int) -> list[np.ndarray]:
        """Remove and return the first `count` tokens of the pieces."""
        taken = []
        self._left -= count
        while count:
            piece, is_whole = self._pieces.popleft()
            if len(piece) > count:
                self.cut += is_whole
                self._pieces.appendleft((piece[count:], False))
                piece = piece[:count]
            taken.append(piece)
            count -= len(piece)
        return taken


def fit_best(documents: list[np.ndarray], length: int) -> list[list[np.ndarray]]:
    """Return groups of documents with at most `length` tokens each, by best-fit decreasing, the fullest group first."""
    groups: list[list[list[np.ndarray]]] = [[] for _ in range(length + 1)]  # space left -> groups
    spaces: list[int] = []  # sorted, each once, without 0
    for document in sorted(documents, key=len, reverse=True):
        found = bisect_left(spaces, len(document))
        space = spaces[found] if found < len(spaces) else length
        group = groups[space].pop() if found < len(spaces) else []
        if found < len(spaces) and not groups[space]:
            del spaces[found]
        group.append(document)
        space -= len(document)
        if space and not groups[space]:
            insort(spaces, space)
        groups[space].append(group)
    return [group for same_space in groups for group in same_space]
