"""`python -m workers.engine.calibrate_command`, as users know it `headgate calibrate`: the largest activations of a model.

Reads a text, runs transformers' own model over it, writes what `model/smoothing.py` reads. Exit status 1 with one sentence
where that cannot be done.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from workers.engine.errors import ModelError

if TYPE_CHECKING:
    import torch
    from torch import nn


@click.command(
    "calibrate", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.argument("model", envvar="HEADGATE_MODEL")
@click.option("--out", required=True, type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--text",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="UTF-8, like what the model will read. Without it: text that the model writes itself.",
)
@click.option("--tokens", default=4096, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--alpha", default=0.5, show_default=True, type=click.FloatRange(0, 1),
    help="How much of the difficulty moves from activations into weights.",
)  # fmt: skip
def main(model: str, out: Path, text: Path | None, tokens: int, alpha: float) -> None:
    """Measures the largest activations of MODEL, for HEADGATE_ENGINE_SMOOTHING."""
    try:
        measured = _measure(model, text, tokens, alpha, out)
    except (ModelError, OSError, UnicodeDecodeError) as error:
        click.echo(f"{error}", err=True)
        sys.exit(1)
    click.echo(f"{out}: {measured} norms over {tokens} tokens at most.")


def _measure(model: str, text: Path | None, tokens: int, alpha: float, out: Path) -> int:
    import torch
    from safetensors.torch import save_file

    from workers.engine.model import checkpoint, loader, smoothing, support

    found = checkpoint.find(model)
    config = loader.read_config(found)
    support.refuse_unsupported(config)
    with torch.inference_mode():
        loaded = loader.build(config, torch.float32, torch.device("cpu"), "sdpa")
        loader.fill(loaded, found, torch.device("cpu"))
        largest: dict[str, torch.Tensor] = {}
        for path, norm, _ in smoothing.sites(loaded):
            norm.register_forward_hook(_keep(largest, path))
        if text is None:
            start = torch.tensor([[config.bos_token_id or 0]])
            how: dict[str, Any] = {"do_sample": True, "max_new_tokens": min(tokens, 512)}
            torch.manual_seed(0)
            loaded.generate(start, attention_mask=torch.ones_like(start), **how)
        else:
            for row in _rows(found.directory, text, tokens):
                loaded(input_ids=torch.tensor([row]), use_cache=False)
    if not largest:
        raise ModelError(
            f"The model type '{config.model_type}' has no layers that can be smoothed."
        )
    save_file(largest, out, metadata={"alpha": str(alpha)})
    return len(largest)


def _keep(
    largest: dict[str, torch.Tensor], path: str
) -> Callable[[nn.Module, object, torch.Tensor], None]:
    def hook(_module: nn.Module, _inputs: object, output: torch.Tensor) -> None:
        found = output.abs().flatten(0, -2).amax(0)
        largest[path] = found.maximum(largest[path]) if path in largest else found

    return hook


def _rows(directory: Path, text: Path, tokens: int) -> Iterator[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    ids = tokenizer.encode(text.read_text(encoding="utf-8")).ids[:tokens]
    if not ids:
        raise ModelError(f"The text {text} is empty.")
    for start in range(0, len(ids), 512):
        yield ids[start : start + 512]


if __name__ == "__main__":
    main()
