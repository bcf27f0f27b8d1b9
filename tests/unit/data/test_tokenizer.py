from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.data.tokenizer import ByteTokenizer, load_tokenizer
from shardwise.errors import UserError


def test_bytes_there_and_back() -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode("naïve ✓")
    assert len(ids) == len("naïve ✓".encode())
    assert ids.max() < tokenizer.eos_id == tokenizer.vocab_size - 1
    assert tokenizer.decode([*ids, tokenizer.eos_id]) == "naïve ✓"


def test_auto_is_bytes_for_presets_and_for_directories_without_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert load_tokenizer("auto", "tiny-llama").identity == "byte"
    assert load_tokenizer("auto", str(tmp_path)).identity == "byte"


def test_auto_takes_the_tokenizer_of_a_model_directory(save_tokenizer: Callable[..., Path]) -> None:
    tokenizer = load_tokenizer("auto", str(save_tokenizer()))
    assert tokenizer.encode("hello world hello").tolist() == [2, 3, 2]
    assert [ids.tolist() for ids in tokenizer.encode_batch(["world", "else"])] == [[3], [0]]
    assert tokenizer.decode([2, 3, 1]) == "hello world"
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (1, 4)


def test_an_id_beyond_any_embedding_is_refused(save_tokenizer: Callable[..., Path]) -> None:
    file = save_tokenizer() / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"]["hello"] = 2**31
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match="a token with the id 2147483648"):
        load_tokenizer(str(file.parent), "tiny-llama")


def test_auto_asks_the_hub_for_an_id_with_the_models_revision(
    save_tokenizer: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    directory = str(save_tokenizer())
    real = transformers.AutoTokenizer.from_pretrained
    asked: list[tuple[str, str | None]] = []

    def from_pretrained(name: str, *, revision: str | None, **rest: object) -> object:
        asked.append((name, revision))
        return real(directory, **rest)

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", from_pretrained)
    tokenizer = load_tokenizer("auto", "owner/model", revision="abc")
    assert asked == [("owner/model", "abc")]
    assert tokenizer.identity.startswith("model@")


def test_identity_follows_content(save_tokenizer: Callable[..., Path]) -> None:
    first = load_tokenizer(str(save_tokenizer()), "tiny-llama").identity
    again = load_tokenizer(str(save_tokenizer()), "tiny-llama").identity
    other = load_tokenizer(str(save_tokenizer(words=("other",))), "tiny-llama").identity
    assert first == again != other


def test_tokenizer_without_eos_is_refused(save_tokenizer: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match="no end-of-sequence token"):
        load_tokenizer(str(save_tokenizer(eos=None)), "tiny-llama")


@pytest.mark.parametrize("content", ["{nope", "{}"])
def test_unreadable_tokenizer_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    with pytest.raises(UserError, match="cannot be loaded") as caught:
        load_tokenizer(str(tmp_path), "tiny-llama")
    assert str(tmp_path) in caught.value.what
    assert "byte" in caught.value.fix


def test_missing_directory_is_a_user_error() -> None:
    with pytest.raises(UserError, match="cannot be loaded"):
        load_tokenizer("./no-such-directory", "tiny-llama")
