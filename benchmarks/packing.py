"""What packing gains: trained tokens a second of conversations, packed and one to a sequence.

    python benchmarks/packing.py [--data FILE] [--format auto] [--tokenizer DIR] [--seq-len 1024]
        [--rounds 3] [--steps 12]

Without FILE, rows are made whose answers have lengths of a log-normal distribution, with a median
of 150 bytes and one in twenty above 560. Without DIR, a tokenizer of at most 8,000 pieces is made
of the rows. The three ways run in turn, several rounds in one go, on one CPU rank; medians are
compared.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

WAYS = {
    "packed": ["data.packing=best_fit"],
    "one, by length": ["data.packing=one", "data.group_lengths=true"],
    "one": ["data.packing=one"],
}
VOCAB = 8000
TEMPLATE = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="rows of conversations")
    parser.add_argument("--format", default="auto", help="data.format")
    parser.add_argument("--tokenizer", help="with a chat template; else one is made")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    given = parser.parse_args()
    speeds: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        config = write_config(Path(folder), given)
        for number in range(given.rounds):
            for way, words in WAYS.items():
                name = f"{way.replace(', ', '-').replace(' ', '-')}-{number}"
                speeds[way].append(measure(config, words, name, given.steps))
    least = statistics.median(speeds["one"])
    for way, found in speeds.items():
        speed = statistics.median(found)
        print(f"{way:16} {speed:9,.0f} trained tok/s  {speed / least:5.2f} x")


def write_config(folder: Path, given: argparse.Namespace) -> Path:
    data = given.data or make_rows(folder / "rows.jsonl")
    words = {"source": "jsonl", "path": str(data.resolve()), "format": given.format}
    if given.tokenizer:
        words["tokenizer"] = str(Path(given.tokenizer).resolve())
    else:
        make_tokenizer(data, folder / "tokenizer")
        words["tokenizer"] = str(folder / "tokenizer")
    sections = {
        "runs_dir": str(folder / "runs"),
        "model": {"name": "tiny-llama", "overrides": {"vocab_size": VOCAB}},
        "data": {**words, "seq_len": given.seq_len},
        "cluster": "1xCPU",
        "train": {"micro_batch": 4},
        "memory": {"compile": False},
        "checkpoint": {"every": 0, "at_end": False},
        "observe": {"log_every": 1},
    }
    path = folder / "run.yaml"
    path.write_text(json.dumps(sections), encoding="utf-8")
    return path


def make_rows(path: Path) -> Path:
    chance = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(800):
            length = int(chance.lognormvariate(5.0, 0.8))
            answer = "".join(chance.choices("abcdefgh ", k=1 + min(length, 900)))
            file.write(json.dumps({"prompt": "say it", "completion": f"{answer}."}) + "\n")
    return path


def make_tokenizer(data: Path, folder: Path) -> None:
    """Pieces of the rows' own text, and a template that any conversation fits."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([data.read_text(encoding="utf-8")], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    made.chat_template = TEMPLATE
    made.save_pretrained(folder)


def measure(config: Path, words: list[str], name: str, steps: int) -> float:
    """Trained tokens a second, without the first two steps."""
    command = [sys.executable, "-m", "shardwise", "train", str(config), *words]
    command += [f"name={name}", f"train.steps={steps}"]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    lines = (config.parent / "runs" / name / "events.jsonl").read_text(encoding="utf-8")
    found = [event for event in map(json.loads, lines.splitlines()) if event["event"] == "step"]
    return sum(each["trained_tokens"] for each in found[2:]) / sum(e["step_s"] for e in found[2:])


if __name__ == "__main__":
    main()
