"""What PEFT itself makes of adapters. Runs in a process of its own, with PEFT on its path.

It reads lines of JSON, and answers each with a line. Importing takes longer than
all of them together.
["logits", BASE, ADAPTER, OUT]: the logits of a few tokens.
["make", BASE, OUT]: new adapters, none of which is zero.
"""

from __future__ import annotations

import json
import sys

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

IDS = torch.arange(24)[None] * 7 % 131


def answer(verb: str, base: str, *places: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    if verb == "make":
        made = get_peft_model(
            model,
            LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False),
        )
        made.save_pretrained(places[0])
        return
    adapted = PeftModel.from_pretrained(model, places[0]).eval()
    with torch.no_grad():
        logits = adapted(input_ids=IDS).logits
    save_file({"logits": logits}, places[1])


for line in sys.stdin:
    answer(*json.loads(line))
    print("done", flush=True)
