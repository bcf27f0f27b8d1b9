"""What is trained, and on which tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model is trained and where its first weights come from."""

    name: str = "tiny-llama"
    """A preset (`shardwise config ls` lists them), a directory with config.json, or a hub id."""

    weights: Literal["auto", "random", "pretrained"] = "auto"
    """`pretrained` reads weights, `random` initialises; `auto` reads them where they exist."""

    weights_from: str | None = None
    """The directory or file of the weights, where they are not beside config.json: safetensors,
    torch.save, or a checkpoint of Accelerate, the HF Trainer, DeepSpeed or DCP."""

    ignore_weights: list[str] = field(default_factory=list)
    """Regular expressions of tensors in the files that may stay unread, such as `^mtp`. Without
    one, a tensor that the model has no place for is an error."""

    overrides: dict[str, Any] = field(default_factory=dict)
    """Fields of the model's config.json to change, such as `num_hidden_layers: 16`."""

    attention: Literal[
        "auto", "sdpa", "eager", "flash_attention_2", "flash_attention_4", "flex_attention"
    ] = "auto"
    """Which attention computes. `auto` is the fastest that is exact for the model and the GPU:
    `flash_attention_4` on Hopper where `shardwise[flash4]` is installed; else `flex_attention`,
    in tiles of torch's compiler, for blocks with a sliding window, soft caps or sinks; else `sdpa`,
    which is cuDNN's where that is faster; `eager` for a family whose class has none of them."""

    revision: str | None = None
    """The hub revision (a commit hash) to read; required with `trust_remote_code`."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model. Needs a pinned `revision` for hub ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Which tokens are trained on, and in which order."""

    source: Literal["stdlib", "text", "jsonl", "parquet", "datasets", "synthetic"] = "stdlib"
    """`stdlib` is the running Python's own source text; `text`, `jsonl` and `parquet` read files,
    the first two also as `.gz` and `.zst`, and `jsonl` also one list in a `.json` file; `datasets`
    reads a saved directory or a hub id; `synthetic` makes random tokens."""

    path: str | list[str] | None = None
    """Files, directories or globs for `text`, `jsonl` and `parquet`; the directory or id for
    `datasets`."""

    mixture: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Several datasets in place of `data.source` and `data.path`: a name for each, its `weight`,
    and its own `path`, `source` (where the path does not tell it), `field`, `name` and `split`.
    Sequences are read in proportion to the weights, whatever the sizes; a small dataset is read
    again, in another order."""

    field: str = "text"
    """The key (jsonl) or column (parquet, datasets) that holds the text."""

    format: Literal["text", "auto", "chat", "prompt", "instruction", "pairs", "labelled"] = "text"
    """What a record holds. `text` is a document in `data.field`. The others are conversations, of
    which only the assistant's turns are trained on: `chat` (`messages`, or ShareGPT's
    `conversations`), `prompt` (`prompt` and `completion`), `instruction` (`instruction`, `input`,
    `output`); `auto` tells them by the keys of each row. Two are for `preference.objective`:
    `pairs` (`prompt`, `chosen`, `rejected`) and `labelled` (`prompt`, `completion`, `label`).
    `shardwise data show` shows them."""

    chat_template: str | None = None
    """A file with a Jinja chat template for conversations; unset: the tokenizer's own."""

    name: str | None = None
    """The configuration name of a hub dataset, such as `wikitext-103-raw-v1`."""

    split: str = "train"
    """The split of a `datasets` source to train on."""

    tokenizer: str = "auto"
    """`byte` (built in, 257 tokens), a local directory or a hub id. `auto` takes the model's own
    tokenizer. For a model without one it takes `byte` where the vocabulary has about that size, and
    is an error otherwise."""

    seq_len: int = 2048
    """Tokens in one training sequence. Documents are packed back to back to this length."""

    packing: Literal["auto", "best_fit", "one", "cut"] = "auto"
    """How conversations share sequences. `best_fit` packs whole ones, the longest first, each into
    the fullest sequence that has room; `one` gives each a sequence of its own; `cut` lays them back
    to back and cuts them where a sequence ends. `auto` is `best_fit`. Text is always laid back to
    back."""

    group_lengths: bool = False
    """With `packing: one`: put conversations of similar lengths into a batch, and leave out the
    padding behind its longest. Needs `memory.compile: false`, because compiled blocks are of one
    length."""

    document_mask: bool = False
    """Tokens attend only to their own document, and its positions start at 0. Conversations that
    share a sequence are always kept apart.
    `model.attention: flash_attention_4` needs no mask for this. The others get an explicit mask,
    with which their fast kernels cannot be used."""

    shuffle: bool = True
    """Read sequences in a seeded random order, a different one in each epoch."""

    eval_fraction: float = 0.0
    """Share of the documents or conversations that is held out for the evaluation loss, 0 to
    0.5."""

    eval_path: str | list[str] | None = None
    """Held-out data of its own, read as `data.path` is, in place of `eval_fraction`."""

    eval_split: str | None = None
    """The split of a `datasets` source that is held out, in place of `eval_fraction`; of
    `eval_path` where that is given too."""

    eval_sequences: int = 64
    """How many held-out sequences one evaluation reads at most."""

    max_corrupt: int = 10
    """How many records that cannot be read or trained on may be skipped (each is named) before the
    run is refused."""

    workers: int = 0
    """Processes that render and tokenise conversations, once some thousands of rows are done. The
    tokens are the same whatever their number. 0: one for each core, at most 16."""

    on_change: Literal["refuse", "restart"] = "refuse"
    """What a resume does where the training tokens or their order changed. `refuse` ends it with
    the changes; `restart` keeps weights, optimizer and step, and reads the data from its start."""

    @property
    def keeps_documents_apart(self) -> bool:
        """Whether attention must not look beyond a document."""
        alone = self.packing == "one" and self.format != "pairs"
        return self.document_mask or (self.format != "text" and not alone)

    @property
    def has_preferences(self) -> bool:
        """Whether a row says which answers are preferred."""
        return self.format in ("pairs", "labelled")

    @property
    def unit(self) -> str:
        """What one row is called."""
        named = {"text": "document", "pairs": "pair", "labelled": "answer"}
        return named.get(self.format, "conversation")
