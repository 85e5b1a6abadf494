"""The command that users call as `headgate calibrate`: measures the largest activations of a model.

It reads a text, runs transformers' own model over it, and writes the file that `model/smoothing.py` reads. It raises one
sentence if that cannot be done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from workers.engine.values.errors import ModelError

if TYPE_CHECKING:
    import torch
    from torch import nn


@click.command(
    "calibrate",
    epilog="\b\nExample:\n  headgate calibrate my-model --out smoothing.safetensors",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.argument("model", envvar="HEADGATE_MODEL")
@click.option(
    "--out",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write, for HEADGATE_ENGINE_SMOOTHING.",
)
@click.option(
    "--text",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="UTF-8 file with text like what the model will read.  [default: text that the model writes itself]",
)
@click.option(
    "--tokens",
    default=4096,
    show_default=True,
    type=click.IntRange(min=1),
    help="The most tokens of text that are read.",
)
@click.option(
    "--alpha",
    default=0.5,
    show_default=True,
    type=click.FloatRange(0, 1),
    help="Share of the scale that moves from activations into weights; 0 moves nothing.",
)
def main(model: str, out: Path, text: Path | None, tokens: int, alpha: float) -> None:
    """Measure the largest activations of MODEL, a directory or hub id, and write them to a file for
    HEADGATE_ENGINE_SMOOTHING.
    """
    try:
        num_norms, num_read = _measure(model, text, tokens, alpha, out)
    except (ModelError, OSError) as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"{out}: {num_norms} norms over {num_read} tokens.")


def _measure(model: str, text: Path | None, tokens: int, alpha: float, out: Path) -> tuple[int, int]:
    """Returns the number of measured norms and of tokens."""
    import torch
    from safetensors.torch import save_file

    from workers.engine.checkpoint import checkpoint, loader, support
    from workers.engine.model import smoothing

    found = checkpoint.find(model)
    if not out.absolute().parent.is_dir():  # checked before the work, not after it
        raise ModelError(f"The directory {out.absolute().parent} does not exist.")
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
            # For mypy any attribute of a module is a Tensor or a Module.
            generate = cast("Callable[..., torch.Tensor]", loaded.generate)
            written = generate(start, attention_mask=torch.ones_like(start), **how)
            num_read = written.shape[1] - 1
        else:
            num_read = 0
            for row in _rows(found.directory, text, tokens):
                loaded(input_ids=torch.tensor([row]), use_cache=False)
                num_read += len(row)
    if not largest:
        raise ModelError(f"The model type '{config.model_type}' has no layers that can be smoothed.")
    save_file(largest, out, metadata={"alpha": str(alpha)})
    return len(largest), num_read


def _keep(largest: dict[str, torch.Tensor], path: str) -> Callable[[nn.Module, object, torch.Tensor], None]:
    def hook(_module: nn.Module, _inputs: object, output: torch.Tensor) -> None:
        found = output.abs().flatten(0, -2).amax(0)
        largest[path] = found.maximum(largest[path]) if path in largest else found

    return hook


def _rows(directory: Path, text: Path, tokens: int) -> Iterator[list[int]]:
    from tokenizers import Tokenizer

    if not (directory / "tokenizer.json").is_file():
        raise ModelError(f"The model directory {directory} has no tokenizer.json.")
    try:
        content = text.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"The text {text} is not UTF-8: {error}.") from None
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    ids = tokenizer.encode(content).ids[:tokens]
    if not ids:
        raise ModelError(f"The text {text} is empty.")
    for start in range(0, len(ids), 512):
        yield ids[start : start + 512]
