"""What torchrun starts in test_parallel.py: the recipe of the tests, on as many ranks as there are."""

import sys
from dataclasses import replace
from pathlib import Path

from test_trainer import recipe

from eyas.data.store import TokenStore
from eyas.training.parallel import World
from eyas.training.trainer import Trainer
from tiny import tiny_target


def configure(out, kind, **run):
    """Everything on that a rank could get wrong: moving average, sharded target, trained table."""
    config = recipe(out, kind, max_steps=8, log_every=1, checkpoint_every=3, shard_target=True, **run)
    head = replace(config.head, train_embeddings="all")
    optim = replace(config.optim, ema=0.9)
    return replace(config, head=head, optim=optim)


if __name__ == "__main__":
    out, kind, store, stop_at, device = sys.argv[1:6]
    run = dict(item.split("=") for item in sys.argv[6:])
    world = World.join(device)
    config = configure(out, kind, **{key: int(value) for key, value in run.items()})
    target = tiny_target()
    target.decoder.to(world.device)
    config = replace(config, run=replace(config.run, precision="float32"))
    trainer = Trainer(config, target, TokenStore.load(Path(store)), world=world)
    run_step = trainer.step.run

    def run_or_die(*args, **kwargs):
        if trainer.state.step == int(stop_at):
            import os
            import signal

            os.kill(os.getpid(), signal.SIGKILL)
        return run_step(*args, **kwargs)

    trainer.step.run = run_or_die
    trainer.train()
    world.leave()
