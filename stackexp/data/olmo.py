"""OLMo's perplexity sets V2 and V3: names, URLs, file layout and token ids.

A file is raw little-endian uint16 despite its .npy suffix: concatenated documents of GPT-NeoX-20B token ids.
"""

from dataclasses import dataclass
from pathlib import Path

BASE_URL = "https://olmo-data.org/eval-data/perplexity"
DEFAULT_FOLDER = Path("data/olmo")
TOKENIZER = "gpt-neox-20b"
VOCAB_SIZE = 50_280  # ids go up to 50,279; OLMo's embedding has 50,304 rows
EMBEDDING_SIZE = 50_304
# The ids that end a document: one of OLMo's two tokenizers has <|endoftext|> at 0 and an IP address mask at 50279, and
# the other has them swapped.
END_OF_TEXT = (0, 50_279)
# Files of OLMo's oldest tools end documents with the last id of the GPT-NeoX-20B tokenizer, which means two spaces.
TWO_SPACES = 50_276
INSTANCE_LENGTH = 2048  # tokens per instance in OLMo's own runs

_V2_INSTANCES = {
    **{"4chan": 490, "c4_100_domains": 451, "c4_en": 498, "gab": 495, "ice": 494, "m2d2_s2orc": 493, "m2d2_wiki": 500},
    **{"manosphere": 442, "mc4_en": 480, "pile": 427, "ptb": 45, "twitterAEE": 439, "wikitext_103": 120},
}
NAMES = {
    "v2": tuple(_V2_INSTANCES),
    "v3": (
        *("c4_en", "dolma_books", "dolma_common-crawl", "dolma_pes2o", "dolma_reddit", "dolma_stack", "dolma_wiki"),
        *("ice", "m2d2_s2orc", "pile", "wikitext_103"),
    ),
}
_FILES = {"v2": "val.npy", "v3": "val/part-0-00000.npy"}


@dataclass(frozen=True)
class OlmoSet:
    """One perplexity set of version "v2" or "v3"."""

    version: str
    name: str

    def __str__(self) -> str:
        return f"{self.version}/{self.name}"

    @property
    def instances(self) -> int | None:
        """The instances of INSTANCE_LENGTH tokens in OLMo's file; None for V3, where the number is not published."""
        return _V2_INSTANCES[self.name] if self.version == "v2" else None

    @property
    def path(self) -> str:
        """The path on the server below BASE_URL."""
        return f"{self.version}_small_gptneox20b/{self.name}/{_FILES[self.version]}"

    def file(self, folder: Path) -> Path:
        """Return the local path below `folder`, such as DEFAULT_FOLDER."""
        return folder / self.version / f"{self.name}.npy"


def list_olmo_sets(version: str) -> list[OlmoSet]:
    """Return all sets of version "v2" or "v3"."""
    return [OlmoSet(version, name) for name in NAMES[version]]
