"""How does flatout get into a Python process that it did not write? Through this file, which `site` imports at start.

The parent puts this folder in front of `PYTHONPATH`. Here we make ourselves invisible again (path, environment, the
`sitecustomize` that we shadow), and wait for the framework's import. Nothing else happens in a process that imports
none. Standard library only; whatever goes wrong, the user's program starts.
"""

from __future__ import annotations

import os
import sys

if False:  # what type checkers read; nothing is imported for it at start
    from collections.abc import Sequence
    from typing import Any

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_OURS = (b"FLATOUT_SESSION", b"FLATOUT_PYTHONPATH", b"PYTHONPATH")


class _Watcher:
    """A finder that lets the framework be found as always, and tells flatout when its import is complete."""

    def __init__(self, session: str) -> None:
        self.session = session
        self.busy = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Delegate to the finders after this one; wrap the loader of the module that is waited for."""
        if self.busy or name not in ("torch", "subprocess"):
            return None
        import importlib.util

        self.busy = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.busy = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.session, self)  # type: ignore[assignment]
        return spec


class _Loader:
    """Runs the real loader, puts everything back as it was, then calls flatout."""

    def __init__(self, loader: Any, session: str, watcher: _Watcher) -> None:
        self.loader = loader
        self.session = session
        self.watcher = watcher

    def create_module(self, spec: Any) -> Any:
        return self.loader.create_module(spec)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = self.loader
        module.__loader__ = self.loader
        self.loader.exec_module(module)
        try:
            if module.__name__ == "subprocess":
                _reach_children(module)
            else:
                if self.watcher in sys.meta_path:
                    sys.meta_path.remove(self.watcher)
                if "subprocess" in sys.modules:
                    _reach_children(sys.modules["subprocess"])
                _load_flatout()
                from flatout.run.child import enter

                enter(self.session)
        except Exception:  # noqa: BLE001  the user's program comes first
            if os.environ.get("FLATOUT_DEBUG"):
                import traceback

                traceback.print_exc()


def _load_flatout() -> None:
    """Import the flatout that this file belongs to, without a trace on `sys.path`."""
    if "flatout" in sys.modules:
        return
    import importlib.util

    package = os.path.dirname(os.path.dirname(_FOLDER))
    spec = importlib.util.spec_from_file_location(
        "flatout", os.path.join(package, "__init__.py"), submodule_search_locations=[package]
    )
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["flatout"] = module
    spec.loader.exec_module(module)


_kept: dict[bytes, bytes] = {}


def _reach_children(subprocess: Any) -> None:
    """Give a child that is started with an environment of its own what a child without one inherits anyway."""
    start = getattr(subprocess, "_fork_exec", None)
    if start is None or getattr(start, "_flatout", False):
        return

    def _fork_exec(
        args: Any, executables: Any, close_fds: Any, fds: Any, cwd: Any, environment: Sequence[bytes] | None, *rest: Any
    ) -> Any:
        if environment is not None:
            environment = _with_ours(environment)
        return start(args, executables, close_fds, fds, cwd, environment, *rest)

    _fork_exec._flatout = True  # type: ignore[attr-defined]
    subprocess._fork_exec = _fork_exec


def _with_ours(environment: Sequence[bytes]) -> Sequence[bytes]:
    names = [entry.split(b"=", 1)[0] for entry in environment]
    if b"FLATOUT_SESSION" in names:
        return environment
    theirs = next((e.split(b"=", 1)[1] for e in environment if e.startswith(b"PYTHONPATH=")), None)
    rest = [e for e in environment if not e.startswith(b"PYTHONPATH=")]
    folder = os.fsencode(_FOLDER)
    path = folder if not theirs else folder + os.fsencode(os.pathsep) + theirs
    ours = [b"FLATOUT_SESSION=" + _kept[b"FLATOUT_SESSION"], b"PYTHONPATH=" + path]
    if theirs is not None:
        ours.append(b"FLATOUT_PYTHONPATH=" + theirs)
    return rest + ours


def _hide() -> str | None:
    """Take our variables out of `os.environ` alone: the process keeps them, so that its children inherit them."""
    values = getattr(os.environ, "_data", None)
    session = os.environ.get("FLATOUT_SESSION")
    if not isinstance(values, dict):  # no such dictionary: be visible rather than lose the children
        return session
    for name in _OURS:
        if name in values:
            _kept[name] = values[name]
            del values[name]
    if b"FLATOUT_PYTHONPATH" in _kept:
        values[b"PYTHONPATH"] = _kept[b"FLATOUT_PYTHONPATH"]
    return session


def _chain() -> None:
    """Import the `sitecustomize` that we shadow; without one, leave no module of that name, as in a plain start."""
    import importlib.machinery
    import importlib.util

    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != _FOLDER]
    sys.path_importer_cache.pop(_FOLDER, None)
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
    if spec is None or spec.loader is None:
        raise ImportError("no sitecustomize besides ours", name="sitecustomize")
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


_session = _hide()
if _session:
    sys.meta_path.insert(0, _Watcher(_session))
_chain()
