"""windfall's own engine, by the same rules as its peers: all requests at once, `batch` of them in flight."""

import workload as peers

PEER = "windfall"
WORKLOAD = peers.load()

try:
    import torch

    import windfall
    from windfall.engine.torch.engine import TorchEngine
    from windfall.models import load
    from windfall.types import Request
except ImportError as error:
    peers.skip(PEER, error, "windfall")


def generate(engine: TorchEngine, prompts: list[list[int]]) -> list[int]:
    for i, (prompt, length) in enumerate(zip(prompts, WORKLOAD.lengths, strict=True)):
        engine.add(Request(id=str(i), prompt=tuple(prompt), seed=i, max_tokens=length))
    made = [0] * len(prompts)
    while len(engine):
        for chunk in engine.step():
            made[int(chunk.id)] += len(chunk.tokens)
    return made


def main() -> None:
    torch.set_num_threads(WORKLOAD.threads)
    model = load.load(WORKLOAD.model, dtype="float32", device="cpu")
    room = WORKLOAD.batch * WORKLOAD.capacity_tokens
    engine = TorchEngine(model, kv_tokens=2 * room, max_running=WORKLOAD.batch)
    generate(engine, WORKLOAD.warm_prompts())
    engine.swap(1)  # forgets every page
    with peers.Timer() as timer:
        made = generate(engine, WORKLOAD.prompts)

    peers.check(WORKLOAD, made)
    peers.report(PEER, windfall.__version__, WORKLOAD, timer, "eager, paged")


if __name__ == "__main__":
    main()
