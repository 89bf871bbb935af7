"""The commands and their options.  Each one imports what it needs only when it runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvloom import __version__
from kvloom.adapters.auto_config import auto_config
from kvloom.cli.bench import bench
from kvloom.cli.failures import guarded
from kvloom.cli.group import Commands
from kvloom.cli.replay import replay
from kvloom.cli.store import store
from kvloom.cli.warmup import warmup

app = typer.Typer(
    name="kvloom",
    cls=Commands,
    help="KV-cache manager for hybrid-attention LLMs: exact prefix reuse over every kind of cached state.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")]
Device = Annotated[str | None, typer.Option(help="Cap of the device tier, such as 512MiB (default) or 2GiB.")]
Segment = Annotated[int | None, typer.Option(help="Tokens per segment, a multiple of the LCM of all blocks.")]
BlockSize = Annotated[int | None, typer.Option(help="Tokens per block of ratio-1 groups (default: 128).")]
Store = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Disk store that outlives the process; made when there is none.")
]
StoreSize = Annotated[
    str | None, typer.Option(help="Cap of the store, such as 100GiB; default: its own, for a new one 16GiB.")
]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; by default the model's own.")]


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"kvloom {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    _: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    # Everything is local, and stderr belongs to our own progress and to one line per error.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # Threads that wait for each other by spinning are several times slower when the cores have other work too.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _list_presets(asked: bool) -> None:
    if asked:
        from kvloom.cli.streams import emit_json, screen
        from kvloom.cli.tables import facts
        from kvloom.spec.presets import PRESETS

        presets = {name: preset.summary for name, preset in PRESETS.items()}
        if "--json" in sys.argv:
            emit_json({"presets": presets})
        else:
            screen().print(facts(list(presets.items())))
        raise typer.Exit


@app.command()
@guarded
def spec(
    model: Annotated[str, typer.Argument(help="Preset name, directory with a config.json, or such a file.")],
    context: Annotated[int | None, typer.Option(help="Tokens of the request that is counted.")] = None,
    block_size: BlockSize = None,
    segment: Segment = None,
    dtype: Dtype = None,
    _: Annotated[
        bool, typer.Option("--list", callback=_list_presets, is_eager=True, help="List the presets and exit.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Show a model's KV cache groups: bytes per token and per request, LCM, page size, totals."""
    from kvloom.cli.settings import load_settings
    from kvloom.cli.spec import spec_table
    from kvloom.cli.streams import emit_json, screen
    from kvloom.engine.files import require_file
    from kvloom.spec.presets import PRESETS, resolve
    from kvloom.spec.report import spec_report

    if model.lower() not in PRESETS:
        require_file(model)
    size = load_settings(None, {"block_size": block_size}).block_size
    report = spec_report(resolve(model, block_size=size, segment=segment, dtype=dtype, complete=auto_config), context)
    if as_json:
        emit_json(report)
    else:
        screen().print(spec_table(report))
    return 0


@app.command()
@guarded
def run(
    *,
    model: Annotated[str, typer.Option(help="Directory with a transformers model, or smollm2.")],
    document: Annotated[Path, typer.Option(help="UTF-8 text file that the questions are about.")],
    question: Annotated[list[str], typer.Option(help="A question; repeat the option for more.")],
    device: Device = None,
    host: Annotated[
        str | None, typer.Option(help="Cap of a host memory tier behind the device, such as 4GiB (default: none).")
    ] = None,
    floor: Annotated[
        str | None, typer.Option(help="Worst grade of reused state: canonical, faithful or approximate.")
    ] = None,
    policy: Annotated[str, typer.Option(help="Eviction policy.")] = "cost",
    record: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write down what the cache was asked, for kvloom replay.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file of --record if it exists.")] = False,
    store: Store = None,
    store_size: StoreSize = None,
    explain: Annotated[bool, typer.Option(help="Say what every lookup found, and what stopped it.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 64,
    config: Annotated[Path | None, typer.Option(help="YAML file with kv_cache_config.")] = None,
    segment: Segment = None,
    block_size: BlockSize = None,
    dtype: Dtype = None,
    on: Annotated[
        str | None, typer.Option(help="torch device to compute on; by default cuda where there is one.")
    ] = None,
    as_json: AsJson = False,
    more: Annotated[list[str] | None, typer.Argument(metavar="[QUESTION]...", help="More questions.")] = None,
) -> int:
    """Answer questions about a document; its state is computed once and reused."""
    from kvloom.cli.cold import store_size as cap_of
    from kvloom.cli.run import RunOptions, run_command
    from kvloom.cli.settings import load_settings

    settings = load_settings(config, {"device": device, "host": host, "floor": floor, "block_size": block_size})
    options = RunOptions(
        model=model,
        document=document,
        questions=(*question, *(more or ())),
        settings=settings,
        max_new_tokens=max_new_tokens,
        segment=segment,
        dtype=dtype,
        on=on,
        policy=policy,
        record=record,
        force=force,
        store=store,
        store_size=cap_of(store, store_size),
        explain=explain,
        as_json=as_json,
    )
    return run_command(options)


@app.command("verify-model")
@guarded
def verify_model(
    model: Annotated[str, typer.Argument(help="Model directory, or a config.json with --random-init.")],
    *,
    random_init: Annotated[bool, typer.Option("--random-init", help="Random weights, drawn from --seed.")] = False,
    tokens: Annotated[int | None, typer.Option(help="Length of the base prompt.")] = None,
    dtype: Dtype = None,
    seed: Annotated[int, typer.Option(help="Draws the token ids, and the weights with --random-init.")] = 0,
    segment: Segment = None,
    block_size: BlockSize = None,
    device: Annotated[str, typer.Option(help="torch device: cpu, cuda, cuda:1, ...")] = "cpu",
    store: Store = None,
    store_size: StoreSize = None,
    as_json: AsJson = False,
) -> int:
    """Prove or disprove on a model that a hit equals a cold run.

    Exit code: 0 exact, 1 differs, 2 unsupported or bad input, 70 internal error.
    """
    from kvloom.cli.cold import store_size as cap_of
    from kvloom.cli.settings import load_settings
    from kvloom.cli.verify import verify

    return verify(
        model,
        lambda: {
            "block_size": load_settings(None, {"block_size": block_size}).block_size,
            "store_size": cap_of(store, store_size),
        },
        as_json=as_json,
        random_init=random_init,
        tokens=tokens,
        dtype=dtype,
        seed=seed,
        segment=segment,
        device=device,
        store=store,
    )


@app.command()
@guarded
def demo(as_json: AsJson = False) -> int:
    """Watch a real hybrid model reuse a long document, answer by answer beside a cold run.

    Exit code: 0 when every warm answer was identical to its cold answer, else 1.
    """
    from kvloom.cli.demo import demo_command

    return demo_command(as_json=as_json)


app.command()(replay)
app.command()(warmup)
app.add_typer(bench)
app.add_typer(store)
