"""What every command shares: --json, --quiet, --debug, errors with exit codes instead of tracebacks, --set."""

import contextlib
import functools
import io
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..core import console, errors
from ..core.errors import EXIT_FILE, Failed, Stopped, ThroughlineError, WrongUse
from ..core.signals import raising

if TYPE_CHECKING:
    from ..train.recipes.recipe import Recipe

LATER_S = 2.0
PATH = click.Path(path_type=Path)
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def option(names: str, kind: Any, text: str, default: Any = ..., **more: Any) -> Callable[[Any], Any]:
    """A click option of these names with its type (None: that of the default) and help."""
    given = {} if default is ... else {"default": default}
    return click.option(*names.split(), type=kind, help=text, **given, **more)


def flag(names: str, text: str) -> Callable[[Any], Any]:
    """A click option that is given or not."""
    return click.option(*names.split(), is_flag=True, help=text)


def together(*options: Any) -> Callable[[Any], Any]:
    """Puts these options on a command, in their order."""
    return lambda function: functools.reduce(lambda made, put: put(made), reversed(options), function)


def set_option(text: str) -> Callable[[Any], Any]:
    """The repeatable --set, as `overrides`."""
    return option("--set overrides", None, text, multiple=True, metavar="SECTION.KEY=VALUE")


class _Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP, by name: it unwinds like Ctrl-C, half-written output is removed, with its own exit code."""


def throughline_command(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --json, --quiet and --debug and turns our errors into messages and exit codes; the last decorator."""

    @flag("--json json_output", "Print one JSON object on stdout, everything else on stderr.")
    @flag("--quiet -q", "Print only the result, warnings and errors.")
    @flag("--debug", "Show the traceback of an error.")
    @raising(_Terminated)  # train, serve and tokenise put their own in its place
    @functools.wraps(function)
    def wrapped(*args: Any, json_output: bool, quiet: bool, debug: bool, **kwargs: Any) -> Any:
        console.configure(json_output=json_output, quiet=quiet)
        if isinstance(sys.stdout, io.TextIOWrapper):
            # as stderr: a path may hold what the terminal cannot show
            sys.stdout.reconfigure(errors="backslashreplace")
        guard = contextlib.ExitStack()
        guard.enter_context(console.guarded_stderr())
        try:
            answer = function(*args, **kwargs)
            _tell_launcher(0)
            return answer
        except ThroughlineError as error:
            _tell_launcher(error.exit_code, type(error).__name__)
            _fail(error, json_output, debug)
        except KeyboardInterrupt as signalled:
            code, said = errors.EXIT_INTERRUPTED, "interrupted"
            if isinstance(signalled, _Terminated):
                code, said = errors.EXIT_STOPPED, f"stopped by {signalled}"
            _tell_launcher(code)
            if _speaks():
                console.write_line(said)
            sys.exit(code)
        except BrokenPipeError:  # who read our output (`| head`) wants no more of it
            _discard_stdout()
            sys.exit(errors.EXIT_FAILED)
        except (click.ClickException, click.exceptions.Exit):
            raise
        except Exception as error:
            _fail(_unforeseen(error), json_output, debug)
        finally:
            console.configure()
            guard.close()

    return wrapped


def _speaks() -> bool:
    """Whether this is the first process, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def _discard_stdout() -> None:
    """Send what is still to be written, the interpreter's last flush included, nowhere: nobody can read it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _tell_launcher(code: int, kind: str = "done") -> None:
    """Under `throughline launch`: what became of the first process, by which it decides about a restart."""
    file = os.environ.get(EXIT_FILE)
    if file and _speaks():
        Path(file).write_text(f"{code} {kind}")


def _unforeseen(error: Exception) -> Failed:
    """A path that the system refuses is the user's to mend; anything else is a fault of ours."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        fix = "check the path, its owner and its permissions; --debug shows what needed it"
        return Failed(error.strerror.lower(), where=error.filename, fix=fix)
    return Failed(f"{type(error).__name__}: {error}", fix="a fault in throughline; run again with --debug")


def _fail(error: ThroughlineError, json_output: bool, debug: bool) -> None:
    if not _speaks():
        if isinstance(error, Stopped):  # they have agreed to stop, and the first says so
            sys.exit(error.exit_code)
        time.sleep(LATER_S)  # what all processes meet is said by the first, which then ends this one
    if debug:
        traceback.print_exc()
    console.fail(error)
    lost = getattr(error, "at_once", False)
    restarts = lost and EXIT_FILE in os.environ  # the launcher starts all again: this is not yet the answer
    if json_output and not restarts:
        try:
            click.echo(json.dumps(error.as_dict()))
        except OSError:  # the terminal or the reader has gone: the exit code still says what happened
            _discard_stdout()
    if lost:  # a run whose other processes stand still: an orderly end would wait for them
        os._exit(error.exit_code)
    sys.exit(error.exit_code)


def is_given(name: str) -> bool:
    """Whether the user gave this option of the running command."""
    source = click.get_current_context().get_parameter_source(name)
    return source is click.core.ParameterSource.COMMANDLINE


def check_is_file(path: Path, fix: str) -> None:
    """Raise WrongUse where there is no file, naming the nearest name beside it."""
    if path.is_dir():
        raise WrongUse("this is a directory, and one file is read", where=path, fix=fix)
    if not path.is_file():
        raise WrongUse("no such file", where=path, fix=errors.beside(path, fix))


def read_stdin() -> str:
    """All of standard input as UTF-8, whatever the locale; bytes that are none are replaced, as in files."""
    return sys.stdin.buffer.read().decode("utf-8-sig", "replace")


DEVICE = "Device that runs the model: cpu, cuda or cuda:N; auto is the GPU when there is one."
DTYPE = (
    "Precision of a torch model: fp32, fp16 or bf16; auto is the one its weights are stored in, where the "
)
DTYPE += "device computes in it."
device_option, dtype_option = option("--device", None, DEVICE, "auto"), option("--dtype", None, DTYPE, "auto")


def backend_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """--device, --dtype, --backend and --threads, as `options`, of every command that runs a model."""

    @functools.wraps(function)
    def wrapped(*args: Any, device: str, dtype: str, backend: str, threads: int | None, **kwargs: Any) -> Any:
        from ..core.backend import BackendOptions

        caches = {name: kwargs.pop(name) for name in ("context", "gpu_memory") if name in kwargs}
        options = BackendOptions(device, dtype, backend, threads, **caches)
        return function(*args, options=options, **kwargs)

    library = (
        "Library that runs the model: own is the one that the file belongs to, auto measures those that can "
    )
    library += (
        "run it and takes the fastest; or torch, torch-compiled, onnxruntime, openvino, llamacpp, tensorrt."
    )
    threads = option("--threads", click.IntRange(1), "CPU threads (default: one per core).")
    return together(device_option, dtype_option, option("--backend", None, library, "own"), threads)(wrapped)


def cache_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """--context and --gpu-memory, for `backend_options`, of commands that keep many sequences of a GPT."""
    share = click.FloatRange(0, 1, min_open=True)
    memory = "Share of a GPU's memory for the weights and the cache of a torch GPT; the rest is for its work."
    context = "Tokens of a GPT's longest sequence, for which the cache has a place (default: the model's)."
    function = option("--gpu-memory", share, memory, 0.9)(function)
    return option("--context", click.IntRange(2), context)(function)


def pretraining_recipe(source: str, overrides: Sequence[str]) -> "Recipe":
    """A recipe of `train` with its overrides, checked and resolved. Raises WrongUse."""
    from ..core.recipe import load_recipe
    from ..train.recipes.recipe import Recipe
    from ..train.recipes.resolved import resolve
    from ..train.recipes.rules import RULES

    return resolve(load_recipe(source, Recipe, overrides, RULES))


def with_weights(overrides: Sequence[str], init_from: str | None) -> tuple[str, ...]:
    """The overrides, with --init-from as one of them."""
    return (*overrides, *([] if init_from is None else [f"model.init_from={init_from}"]))


WEIGHTS = "Weights to begin with: a run, checkpoint, model or Hugging Face directory; for train a nanoGPT or "
init_from_option = option("--init-from", click.Path(), WEIGHTS + "Megatron-LM checkpoint too.")
recipe_options = together(
    click.argument("recipe"), set_option("Set a field of the recipe to another value. Repeatable.")
)
