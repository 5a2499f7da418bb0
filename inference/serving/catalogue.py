"""Which models a server has: by name, from where and on which devices; opened, replaced by a newer checkpoint and ended
while requests go on. The newer one opens beside the older, which ends when it has answered what it was asked: for that
time both are in memory.
"""

import asyncio
import re
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException

from ...core.backend import AUTO, BackendOptions
from ...core.console import say, warn
from ...core.errors import WrongUse
from ..runtimes.source import no_model
from .accounts import LIMITS, ServerLimits, later
from .remote import Remote
from .served import ServedModel

LOOK_S = 1.0  # between two looks for a newer checkpoint
DEVICES = re.compile(r"(.+)@((?:,?(?:auto|cpu|cuda(?::\d+)?)\b)+)")  # PATH@DEVICE,DEVICE


@dataclass(frozen=True)
class Source:
    """A model that can be served: its name, where it lies, and the devices of its own (none: that of all models)."""

    name: str
    path: Path
    devices: tuple[str, ...] = ()

    @classmethod
    def of(cls, spec: str) -> "Source":
        """What `[NAME=]PATH[@DEVICE,...]` says; NAME is else the path's last part. Raises WrongUse without a path."""
        name, path, devices = "", spec, ()
        if not Path(spec).exists():
            if found := DEVICES.fullmatch(spec):
                path, devices = found[1], tuple(found[2].split(","))
            if "=" in path and not Path(path).exists():
                name, _, path = path.partition("=")
                if not (name and path):
                    fix = "give NAME=PATH, or PATH alone"
                    raise WrongUse("a model needs a name and a path", where=spec, fix=fix)
        if not Path(path).exists():
            raise no_model(Path(path))
        return cls(name or Path(path).resolve().name, Path(path), devices)

    @property
    def is_run(self) -> bool:
        return (self.path / "checkpoints").is_dir()

    def newest(self) -> Path | None:
        """A run's newest checkpoint that has been read back and found as written; None while there is none."""
        from ...train.checkpoints.run_directory import locate  # a quarter of a second

        with suppress(WrongUse):
            return locate(self.path)
        return None

    def model(self, limits: ServerLimits, options: BackendOptions) -> ServedModel:
        all_options = [replace(options, device=device) for device in self.devices] or [options]
        remotes = [Remote(self.name, str(self.path), one, limits) for one in all_options]
        return ServedModel(self.name, remotes, limits)


class Catalogue:
    """The models of a server: `follow` runs to newer checkpoints, let others be loaded by name from `directory`."""

    def __init__(
        self,
        specs: Sequence[str],
        limits: ServerLimits = LIMITS,
        options: BackendOptions = AUTO,
        follow: bool = False,
        directory: Path | None = None,
    ) -> None:
        self._limits, self._options, self._follow, self.directory = limits, options, follow, directory
        self._given: dict[str, Source] = {}
        for source in map(Source.of, specs):
            if source.name in self._given:
                what, fix = f"two models are called {source.name!r}", "give names: NAME=PATH"
                raise WrongUse(what, where=source.path, fix=fix)
            self._given[source.name] = source
        if follow and not any(source.is_run for source in self._given.values()):
            raise WrongUse("there is no run to follow", where="--follow", fix="give the directory of a run")
        self.models = [source.model(limits, options) for source in self._given.values()]
        self._opening: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def sources(self) -> dict[str, Source]:
        """All models that are known, served or not, by name."""
        files = self.directory.iterdir() if self.directory else ()
        beside = {file.name: Source(file.name, file) for file in files if not file.name.startswith(".")}
        return beside | self._given

    def find(self, name: str) -> ServedModel:
        """The model of that name. Raises HTTPException 404."""
        found = next((model for model in self.models if model.name == name), None)
        if found is None:
            raise HTTPException(404, f"there is no model {name[:200]!r}; /v1/models lists them")
        return found

    def describe(self) -> list[dict[str, Any]]:
        served = {model.name: model.describe() for model in self.models}
        absent = {"object": "model", "owned_by": "throughline", "created": 0, "endpoints": [], "ready": False}
        absent |= {"status": {"value": "unloaded"}}
        return [*served.values(), *({"id": name} | absent for name in self.sources() if name not in served)]

    async def start(self) -> None:
        """Open the models that were given. Raises what opening one raised."""
        await asyncio.gather(*(self._open(self._given[model.name], model) for model in self.models))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        models = [model.close() for model in self.models]
        await asyncio.gather(*models, *self._tasks, return_exceptions=True)

    async def load(self, name: str) -> None:
        """Open a model that is known and not served. Raises WrongUse and HTTPException 404, and what opening raised."""
        source = self.sources().get(name)
        if source is None:
            raise HTTPException(404, f"there is no model {name[:200]!r} to load")
        if name in self._opening or any(model.name == name for model in self.models):
            raise WrongUse(f"{name} is loaded already", where="model")
        self._opening.add(name)
        try:
            model = source.model(self._limits, self._options)
            await self._open(source, model)
            self.models.append(model)
        finally:
            self._opening.discard(name)
        say(f"{name} is loaded")

    def unload(self, name: str) -> None:
        """Give no more requests to a model; it ends when it has answered those that it has."""
        model = self.find(name)
        if not model.facts:
            raise later(503, f"the model {name} is loading", 5)
        self.models.remove(model)
        self._begin(self._retire(model))
        say(f"{name} is unloaded")

    async def _open(self, source: Source, model: ServedModel) -> None:
        """Open a model, of a run that is followed its newest checkpoint, as soon as there is one."""
        followed = self._follow and source.is_run
        while followed and (newest := await asyncio.to_thread(source.newest)) is None:
            await asyncio.sleep(LOOK_S)
        try:
            await model.start(newest if followed else None)
        except BaseException:
            await model.close()
            raise
        if followed:
            self._begin(self._keep_newest(source, model))

    async def _keep_newest(self, source: Source, model: ServedModel) -> None:
        """Serve each newer checkpoint of a run until it is unloaded; what cannot be opened is passed over."""
        tried = model.checkpoint
        while True:
            await asyncio.sleep(LOOK_S)
            newest = await asyncio.to_thread(source.newest)
            if newest in (None, tried):
                continue
            tried, newer = newest, source.model(self._limits, self._options)
            try:
                await newer.start(newest)
            except Exception as error:
                await newer.close()
                warn(f"{source.name}: {newest} cannot be served and is passed over: {error}")
                continue
            if model not in self.models:  # it was unloaded meanwhile
                await newer.close()
                return
            self.models[self.models.index(model)] = newer
            self._begin(self._retire(model))
            model = newer
            say(f"{source.name} is now {newest.name}")

    async def _retire(self, model: ServedModel) -> None:
        try:
            await model.finished()
        finally:
            await model.close()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
