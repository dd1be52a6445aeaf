"""Print docs/tinker-methods.md: every public method of the Tinker SDK, and what `windfall tinker` makes of it.

    python scripts/tinker_methods.py > docs/tinker-methods.md

The methods are those of the SDK that is installed here. tests/tinker/test_methods.py calls each one of them, and checks
that it does what the page says.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version

CLASSES = ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient", "AdminClient", "APIFuture")
WORKS, CLIENT, REFUSED = "works", "client", "refused"
STATES = {
    WORKS: "asks the server, and does what the SDK says",
    CLIENT: "is answered by the SDK, without a request of its own",
    REFUSED: "is refused at the call, and the error says what to do instead",
}
TWIN = "_async"
"""Most methods have a deprecated twin with this ending, which does the same."""
COPY = "also of public weights of another account; the project has no effect"
PROJECTS = "there are no projects: every account has its own sessions and weights"
STATE: dict[str, tuple[str, str]] = {
    "ServiceClient.close": (WORKS, "ends the session; what it holds is freed"),
    "ServiceClient.copy_weights": (WORKS, COPY),
    "ServiceClient.create_custom_loss": (CLIENT, "the SDK traces the loss and runs it on the client"),
    "ServiceClient.create_lora_training_client": (WORKS, "any rank up to the server's; attention, MLP, head; AdamW"),
    "ServiceClient.create_rest_client": (CLIENT, ""),
    "ServiceClient.create_sampling_client": (WORKS, "the base model, or saved weights"),
    "ServiceClient.create_training_client_from_state": (WORKS, "also from public weights of another account"),
    "ServiceClient.create_training_client_from_state_with_optimizer": (WORKS, ""),
    "ServiceClient.get_console_url": (CLIENT, "a page of Thinking Machines, not of this server"),
    "ServiceClient.get_server_capabilities": (WORKS, ""),
    "ServiceClient.get_telemetry": (CLIENT, "the server drops what the SDK reports of itself"),
    "TrainingClient.create_sampling_client": (WORKS, ""),
    "TrainingClient.forward": (WORKS, "cross_entropy, importance_sampling, ppo, cispo, dro"),
    "TrainingClient.forward_backward": (WORKS, "the same losses; several targets of a position with cross_entropy"),
    "TrainingClient.forward_backward_custom": (
        WORKS,
        "forward on the server, the loss on the client, then its gradient",
    ),
    "TrainingClient.get_console_url": (CLIENT, "a page of Thinking Machines, not of this server"),
    "TrainingClient.get_info": (CLIENT, "asked for when the client was created"),
    "TrainingClient.get_telemetry": (CLIENT, ""),
    "TrainingClient.get_tokenizer": (CLIENT, "transformers loads it from the hub, or from the server's disk"),
    "TrainingClient.load_state": (WORKS, ""),
    "TrainingClient.load_state_with_optimizer": (WORKS, ""),
    "TrainingClient.optim_step": (WORKS, "AdamW with the given settings"),
    "TrainingClient.save_state": (WORKS, ""),
    "TrainingClient.save_weights_and_get_sampling_client": (WORKS, "snapshot and inflight"),
    "TrainingClient.save_weights_external": (REFUSED, "saved weights are PEFT folders on the server's disk"),
    "TrainingClient.save_weights_for_sampler": (WORKS, ""),
    "SamplingClient.compute_logprobs": (WORKS, ""),
    "SamplingClient.create": (WORKS, ""),
    "SamplingClient.from_sampler_handle": (CLIENT, "the new client's calls have numbers of their own"),
    "SamplingClient.get_base_model": (CLIENT, ""),
    "SamplingClient.get_sampler_handle": (CLIENT, ""),
    "SamplingClient.get_telemetry": (CLIENT, ""),
    "SamplingClient.get_tokenizer": (CLIENT, "transformers loads it by the base's name, which must be a hub id"),
    "SamplingClient.on_queue_state_change": (CLIENT, "logs why a sample waits, as the server says"),
    "SamplingClient.sample": (WORKS, "log-probs of tokens and prompt, the most likely tokens of the prompt"),
    "RestClient.assign_session_project": (REFUSED, PROJECTS),
    "RestClient.copy_weights": (WORKS, COPY),
    "RestClient.delete_checkpoint": (WORKS, ""),
    "RestClient.delete_checkpoint_from_tinker_path": (WORKS, ""),
    "RestClient.export_session_trace": (REFUSED, "`windfall top` shows what the server does"),
    "RestClient.get_audit_log": (REFUSED, "there is one organization, and no log of it"),
    "RestClient.get_billing_usage": (REFUSED, "the server writes no invoices"),
    "RestClient.get_current_checkpoint_storage_usage": (WORKS, "of the account"),
    "RestClient.get_external_weights_urls": (REFUSED, "there are no external weights"),
    "RestClient.get_sampler": (WORKS, ""),
    "RestClient.get_server_capabilities": (WORKS, ""),
    "RestClient.get_session": (WORKS, ""),
    "RestClient.get_telemetry": (CLIENT, ""),
    "RestClient.get_training_run": (WORKS, ""),
    "RestClient.get_training_run_by_tinker_path": (WORKS, ""),
    "RestClient.get_weights_info_by_tinker_path": (WORKS, ""),
    "RestClient.list_checkpoints": (WORKS, ""),
    "RestClient.list_sessions": (WORKS, "open ones"),
    "RestClient.list_training_runs": (WORKS, ""),
    "RestClient.list_user_checkpoints": (WORKS, ""),
    "RestClient.publish_checkpoint_from_tinker_path": (WORKS, "other accounts can then load them"),
    "RestClient.search_sessions": (WORKS, "open ones"),
    "RestClient.set_checkpoint_ttl_from_tinker_path": (WORKS, ""),
    "RestClient.unpublish_checkpoint_from_tinker_path": (WORKS, ""),
    "RestClient.whoami": (REFUSED, "the SDK reads it from a token (JWT); this server accepts API keys"),
    "AdminClient.get_audit_log": (REFUSED, "there is one organization, and no log of it"),
    "AdminClient.get_billing_usage": (REFUSED, "the server writes no invoices"),
    "AdminClient.get_current_checkpoint_storage_usage": (WORKS, "of the account"),
    "AdminClient.get_telemetry": (CLIENT, ""),
    "APIFuture.coroutine": (CLIENT, "what `await` uses"),
    "APIFuture.future": (CLIENT, "the same as a future of concurrent.futures"),
    "APIFuture.result": (WORKS, ""),
    "APIFuture.result_async": (WORKS, ""),
}
"""What each method does here, and a remark. Twins are left out where they do the same."""
HEAD = """# Methods of the Tinker SDK

What `windfall tinker` makes of every public method of the SDK ({sdk}). `scripts/tinker_methods.py` writes this page
from the SDK itself, and a test calls each method on a server. {twins} methods whose name ends in `_async` are
deprecated twins, in the same row.

| | methods | |
|---|---|---|
"""


def methods() -> list[str]:
    """The public methods of the SDK that is installed, as Class.method."""
    import tinker

    return [f"{name}.{method}" for name in CLASSES for method in _public(getattr(tinker, name))]


def _public(kind: type) -> Iterator[str]:
    for name, _ in inspect.getmembers(kind, callable):
        own = any(name in vars(base) for base in kind.__mro__ if base.__module__.startswith("tinker"))
        if own and not name.startswith("_"):
            yield name


def base_of(method: str) -> str:
    """The method whose row this one is in.

    >>> base_of("RestClient.get_session_async"), base_of("APIFuture.result_async")
    ('RestClient.get_session', 'APIFuture.result_async')
    """
    return method if method in STATE else method.removesuffix(TWIN)


def state_of(method: str) -> str:
    return STATE[base_of(method)][0]


def page() -> str:
    found = methods()
    counts = Counter(map(state_of, found))
    twins = sum(1 for method in found if base_of(method) != method)
    lines = [HEAD.format(sdk=version("tinker"), twins=twins).rstrip()]
    lines += [f"| {state} | {counts[state]} | {meaning} |" for state, meaning in STATES.items()]
    lines += [f"| all | {len(found)} | |"]
    for name in CLASSES:
        lines += [f"\n## {name}\n", "| method | | |", "|---|---|---|"]
        for method in found:
            own, _, short = method.partition(".")
            if own == name and base_of(method) == method:
                state, remark = STATE[method]
                names = [
                    short,
                    *([short + TWIN] if f"{method}{TWIN}" in found and base_of(f"{method}{TWIN}") == method else []),
                ]
                lines.append(f"| {', '.join(f'`{n}`' for n in names)} | {state} | {remark} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
