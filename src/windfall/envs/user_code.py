"""Loads a user's function or class from a module or a file. The error names the file and line of what went wrong.

This runs code of the user: call it in a child process. Whatever that code raises is reported, also a KeyboardInterrupt.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from windfall.envs.failures import message_of, source_location
from windfall.errors import WindfallError, nearest


def load(spec: str, where: str) -> Any:
    """What `package.module:name` or `path/to/file.py:name` names. `where`: the key of the recipe. The current folder is
    on the import path, as with `python -m`; so is the folder of the file, as with `python file.py`."""
    module_name, _, name = spec.rpartition(":")
    module = _file(Path(module_name), where) if module_name.endswith(".py") else _module(module_name, where)
    if not hasattr(module, name):
        fix = nearest(name, (n for n in dir(module) if not n.startswith("_")))
        raise WindfallError(f"there is no {name!r} in {module_name}", where=where, fix=fix)
    return getattr(module, name)


def _module(name: str, where: str) -> ModuleType:
    _on_path(os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as e:
        if e.name is None or not (name == e.name or name.startswith(f"{e.name}.")):
            raise error(f"importing {name}", e) from e
        what = f"cannot import {name!r}: there is no module {e.name!r}"
        fix = f"Put it into {os.getcwd()} or into the packages of {sys.executable}."
        raise WindfallError(what, where=where, fix=fix) from e
    except WindfallError:
        raise
    except BaseException as e:  # fault boundary: this is foreign code
        raise error(f"importing {name}", e) from e


def _file(path: Path, where: str) -> ModuleType:
    if not path.is_file():
        raise WindfallError("no such file", where=f"{where}: {path}", fix=f"The current folder is {os.getcwd()}.")
    name = f"_windfall_user_{path.resolve().with_suffix('').as_posix().replace('/', '_')}"
    if name in sys.modules:
        return sys.modules[name]
    _on_path(os.getcwd())
    _on_path(str(path.resolve().parent))
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None and found.loader is not None, f"{path} ends with .py"
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except BaseException as e:  # fault boundary: this is foreign code
        del sys.modules[name]
        if isinstance(e, WindfallError):
            raise
        raise error(f"importing {path}", e) from e
    return module


def _on_path(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)


def error(doing: str, e: BaseException) -> WindfallError:
    where = source_location(e)
    if isinstance(e, SyntaxError):
        line = f"\n    {e.text.strip()}" if e.text else ""
        return WindfallError(f"{doing} found a syntax error: {e.msg}", where=where, fix=f"Correct this line:{line}")
    if isinstance(e, ModuleNotFoundError) and e.name is not None and "." not in e.name:
        fix = f"Install its package for {sys.executable} (pip install {e.name}), or put it into {os.getcwd()}."
        return WindfallError(f"{doing} needs the module {e.name!r}, which is not installed", where=where, fix=fix)
    frames = [f for f in traceback.extract_tb(e.__traceback__) if not f.filename.startswith("<frozen ")][-5:]
    shown = "\n".join(f"  {f.filename}:{f.lineno} in {f.name}: {f.line}" for f in frames)
    fix = f"The last calls were:\n{shown}"
    return WindfallError(f"{doing} raised {type(e).__name__}: {message_of(e)}", where=where, fix=fix)
