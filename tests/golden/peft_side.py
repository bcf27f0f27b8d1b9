"""What PEFT itself makes of adapters. Runs in a process of its own, with PEFT on its path.

It reads lines of JSON, and answers each with a line. Importing takes longer than
all of them together.
["logits", BASE, ADAPTER, OUT]: the logits of a few tokens. Tables of the base get as many rows as
those of the adapter.
["make", BASE, OUT, MODULE ...]: new adapters, none of which is zero, and these modules trained
whole, changed a little.
"""

from __future__ import annotations

import json
import sys

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

IDS = torch.arange(24)[None] * 7 % 131


def answer(verb: str, base: str, *places: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    if verb == "make":
        out, *whole = places
        how = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
        how.modules_to_save = whole or None
        made = get_peft_model(model, how)
        for name, param in made.named_parameters():
            if "modules_to_save" in name:
                param.data += 0.1
        made.save_pretrained(out)
        return
    tables = [
        t
        for name, t in load_file(f"{places[0]}/adapter_model.safetensors").items()
        if "embed_tokens" in name
    ]
    if tables:
        model.resize_token_embeddings(len(tables[0]), mean_resizing=False)
    adapted = PeftModel.from_pretrained(model, places[0]).eval()
    with torch.no_grad():
        logits = adapted(input_ids=IDS).logits
    save_file({"logits": logits}, places[1])


for line in sys.stdin:
    answer(*json.loads(line))
    print("done", flush=True)
