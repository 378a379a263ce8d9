"""OLMo's perplexity sets V2 and V3: their names, where they lie on the server and on a disk, what their ids mean.

A file is raw little-endian uint16, whatever its suffix says: documents of GPT-NeoX-20B token ids one after the other.
"""

from dataclasses import dataclass
from pathlib import Path

BASE_URL = "https://olmo-data.org/eval-data/perplexity"
DEFAULT_FOLDER = Path("data/olmo")
TOKENIZER = "gpt-neox-20b"
VOCAB_SIZE = 50_280  # ids up to 50,279; OLMo's embedding has 50,304 rows
EMBEDDING_SIZE = 50_304
# What ends a document: of OLMo's two tokenizers one has <|endoftext|> at 0 and a mask of IP addresses at 50279, the
# other has them the other way round.
END_OF_TEXT = (0, 50_279)
# So does, in files of OLMo's first tools, the last id of GPT-NeoX-20B's tokenizer, which is also its token for this.
TWO_SPACES = 50_276
INSTANCE = 2048  # tokens of an instance in OLMo's own runs

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
_ENDINGS = {"v2": "val.npy", "v3": "val/part-0-00000.npy"}


@dataclass(frozen=True)
class OlmoSet:
    """One set of `version` v2 or v3."""

    version: str
    name: str

    def __str__(self) -> str:
        return f"{self.version}/{self.name}"

    @property
    def instances(self) -> int | None:
        """Of INSTANCE tokens in OLMo's own file; not known of V3."""
        return _V2_INSTANCES[self.name] if self.version == "v2" else None

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
