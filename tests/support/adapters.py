"""LoRA adapters as PEFT saves them, with random numbers."""

import json
import shutil
from pathlib import Path

RANK, ALPHA = 4, 8


def write_adapter(model: Path, folder: Path, *, seed: int) -> Path:
    """Write an adapter of a model's attention."""
    import torch
    from safetensors.torch import load_file, save_file

    folder.mkdir()
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ["q_proj", "v_proj", "o_proj"]}))
    chosen = torch.Generator().manual_seed(seed)
    tensors = {}
    for path in sorted(model.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            if name.endswith(("q_proj.weight", "v_proj.weight", "o_proj.weight")):
                module = "base_model.model." + name.removesuffix(".weight")
                rows, columns = tensor.shape
                tensors[f"{module}.lora_A.weight"] = torch.randn(RANK, columns, generator=chosen) * 0.2
                tensors[f"{module}.lora_B.weight"] = torch.randn(rows, RANK, generator=chosen) * 0.2
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merged(model: Path, adapter: Path, folder: Path) -> Path:
    """Write a model that has an adapter in its weights."""
    from safetensors.torch import load_file, save_file

    copy = shutil.copytree(model, folder)
    parts = load_file(adapter / "adapter_model.safetensors")
    for path in copy.glob("*.safetensors"):
        tensors = load_file(path)
        for name in tensors:
            module = "base_model.model." + name.removesuffix(".weight")
            if (down := parts.get(f"{module}.lora_A.weight")) is not None:
                tensors[name] += parts[f"{module}.lora_B.weight"] @ down * (ALPHA / RANK)
        save_file(tensors, path, metadata={"format": "pt"})
    return copy


__all__ = ["merged", "write_adapter"]
