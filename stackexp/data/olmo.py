"""OLMo's perplexity sets V2 and V3: their names, where they lie on the server and on a disk, what their ids mean.

A file is raw little-endian uint16, whatever its suffix says: documents of GPT-NeoX-20B token ids one after the other.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

BASE_URL = "https://olmo-data.org/eval-data/perplexity"
DEFAULT_FOLDER = Path("data/olmo")
TOKENIZER = "gpt-neox-20b"
VOCAB_SIZE = 50_280  # ids up to 50,279; OLMo's embedding has 50,304 rows
EMBEDDING_SIZE = 50_304
# The id that ends a document: <|endoftext|>, or the tokenizer's last id, which OLMo's first tools took for it: 50276
# of GPT-NeoX-20B (also its token for two spaces), 50279 of that tokenizer with three more for names that were removed.
END_OF_TEXT = (0, 50_276, 50_279)
INSTANCE = 2048  # tokens of an instance in OLMo's own runs

NAMES = {
    "v2": (
        *("4chan", "c4_100_domains", "c4_en", "gab", "ice", "m2d2_s2orc", "m2d2_wiki", "manosphere", "mc4_en", "pile"),
        *("ptb", "twitterAEE", "wikitext_103"),
    ),
    "v3": (
        *("c4_en", "dolma_books", "dolma_common-crawl", "dolma_pes2o", "dolma_reddit", "dolma_stack", "dolma_wiki"),
        *("ice", "m2d2_s2orc", "pile", "wikitext_103"),
    ),
}
_ENDINGS = {"v2": "val.npy", "v3": "val/part-0-00000.npy"}


@dataclass(frozen=True)
class OlmoSet:
    """One set of `version` v2 or v3."""

    version: str
    name: str

    def __str__(self) -> str:
        return f"{self.version}/{self.name}"

    @property
    def label(self) -> str:
        """OLMo's name of it."""
        return f"{self.version}-small-{self.name}-validation"

    @property
    def path(self) -> str:
        """Its path on the server, below BASE_URL."""
        return f"{self.version}_small_gptneox20b/{self.name}/{_ENDINGS[self.version]}"

    @property
    def url(self) -> str:
        return f"{BASE_URL}/{self.path}"

    def file(self, folder: Path) -> Path:
        """Its place below `folder`, such as DEFAULT_FOLDER."""
        return folder / self.version / f"{self.name}.npy"


def olmo_sets(version: str) -> list[OlmoSet]:
    return [OlmoSet(version, name) for name in NAMES[version]]


def find_end_of_text(tokens: np.ndarray, candidates: tuple[int, ...] = END_OF_TEXT) -> int | None:
    """The id that ends the documents of `tokens` [N]: the candidate that the file ends with.

    None if it ends with none of them: it is one text, or was cut.
    """
    return int(tokens[-1]) if len(tokens) and int(tokens[-1]) in candidates else None
