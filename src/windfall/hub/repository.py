"""A model repository on the Hugging Face hub, through the hub's own client.

Large files are uploaded first, then one commit shows them all: a reader never sees half a model. A push that was
interrupted leaves a repository without files, and blobs that the next push does not send again.

What a repository holds is replaced only if a push of the same run put it there, or with --overwrite.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from windfall.errors import WindfallError
from windfall.hub.contents import ORIGIN, Contents

TIMEOUT_S = 120.0
"""Seconds without a byte after which a request counts as failed. The client tries it again, up to five times."""
CREATED = ".gitattributes"
"""The file that a repository has when the hub has created it."""


class Repository:
    def __init__(self, name: str, *, private: bool, overwrite: bool) -> None:
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id

        self.name, self._private, self._overwrite = name, private, overwrite
        try:
            validate_repo_id(name)
        except HFValidationError as e:
            raise WindfallError(str(e), where=name, fix="Name the repository as OWNER/NAME.") from e
        if name.count("/") != 1:
            raise WindfallError("not the name of a repository", where=name, fix="Name it as OWNER/NAME.")

    def check(self) -> None:
        """Refuse to start without a token: to write a merged model first would take minutes."""
        from huggingface_hub import constants, get_token

        if constants.HF_HUB_OFFLINE:
            raise WindfallError(
                "the hub is turned off by HF_HUB_OFFLINE", where=self.name, fix="Unset it, or --dry-run."
            )
        if get_token() is None:
            fix = "Log in with `hf auth login`, or set HF_TOKEN to a token that may write."
            raise WindfallError("there is no token for the Hugging Face hub", where=self.name, fix=fix)

    def send(self, contents: Contents) -> str:
        """Create the repository if there is none, and commit the files. Returns what was done, for people."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_session

        get_session().timeout = TIMEOUT_S
        api = HfApi()
        with self._errors_named():
            api.create_repo(self.name, private=self._private, exist_ok=True)
            there = set(api.list_repo_files(self.name)) - {CREATED}
            if there and not self._overwrite:
                self._refuse_foreign(api, there, contents)
            added = [CommitOperationAdd(name, _data(file)) for name, file in contents.files.items()]
            stale = [CommitOperationDelete(name) for name in sorted(there - contents.files.keys())]
            message = f"Step {contents.origin.step} of {contents.origin.run}"
            done = api.create_commit(self.name, [*added, *stale], commit_message=message)
        what = f"pushed step {contents.origin.step} of {contents.run} to {api.endpoint}/{self.name}"
        return f"{what}: {len(added)} files, {contents.size() / 1e6:,.1f} MB, commit {done.oid[:12]}"

    def _refuse_foreign(self, api: Any, there: set[str], contents: Contents) -> None:
        """Raise WindfallError unless a push of the same run wrote what is there."""
        origin: dict[str, Any] | None = None
        if ORIGIN in there:
            with tempfile.TemporaryDirectory() as folder:
                text = Path(api.hf_hub_download(self.name, ORIGIN, local_dir=folder)).read_text(encoding="utf-8")
            try:
                found = json.loads(text)
            except ValueError:
                found = None
            origin = found if isinstance(found, dict) else None
        if not contents.origin.is_same_run(origin):
            of = f"of the run {origin['run']}" if origin and origin.get("run") else "that windfall did not push"
            what = f"this repository holds {len(there)} files {of}, such as {min(there)}"
            raise WindfallError(
                what, where=self.name, fix="Name another repository, or add --overwrite to replace them."
            )

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except WindfallError:  # raised again
            raise
        except Exception as e:  # fault boundary: the hub's client, and the libraries below it
            raise self._explain(e) from e

    def _explain(self, error: Exception) -> WindfallError:
        from huggingface_hub.errors import HfHubHTTPError

        chain: list[BaseException] = [error]
        while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
            chain.append(cause)
        answer = next((e for e in chain if isinstance(e, HfHubHTTPError)), None)
        status = answer.response.status_code if answer is not None and answer.response is not None else 0
        said = str(getattr(answer, "server_message", "") or "").strip()
        said = f": {said}" if said else ""
        if status == 401:
            fix = "Log in again with `hf auth login`, or set HF_TOKEN to a token that is valid."
            return WindfallError(f"the hub does not accept the token{said}", where=self.name, fix=fix)
        if status in (403, 404):
            fix = f"Use a token that may write to {self.name.partition('/')[0]}, or push to a name of your own."
            return WindfallError(f"the token has no right to write to this repository{said}", where=self.name, fix=fix)
        again = "Give the same command again: what was uploaded completely is not sent again."
        if status:
            return WindfallError(f"the hub answered with status {status}{said}", where=self.name, fix=again)
        last = chain[-1]
        what = f"the push did not reach its end: {type(last).__name__}: {last}"
        return WindfallError(what, where=self.name, fix=f"Is the network there? {again}")


def _data(file: Path | bytes) -> str | bytes:
    return file if isinstance(file, bytes) else str(file)
