"""A process dies while it writes the head: no reader takes what is there for one, and the run goes on."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_trainer import greedy_store, recipe

from eyas.core.errors import ModelFormatError
from eyas.drafters.artifact import load_head
from eyas.drafters.files import refuse_foreign
from eyas.training.trainer import Trainer
from tiny import tiny_target

HEAD = ("eyas.json", "model.safetensors", "config.json")

CHILD = """
import sys, os, pathlib, shutil, signal
sys.path[:0] = {paths!r}
from test_killed_at_the_end import trainer
from eyas.data.store import TokenStore
from eyas.training.trainer import Trainer

store = TokenStore.load(pathlib.Path({store!r}))
base = pathlib.Path({base!r})
shutil.copytree(base / "fresh", base / "warm")
trainer(base / "warm", store).train()  # what is imported late is imported once, for all that are forked

def die_after(moves):
    # Counts moves onto, and removals of, the head's three files; SIGKILL right after one of them.
    left = [moves]
    def counted(method):
        def wrapper(path, *args, **kwargs):
            result = method(path, *args, **kwargs)
            there = pathlib.Path(args[0]) if args else path
            if there.name in {head!r} and there.parent.name.startswith("cut"):
                left[0] -= 1
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)
            return result
        return wrapper
    pathlib.Path.replace, pathlib.Path.unlink = counted(pathlib.Path.replace), counted(pathlib.Path.unlink)

for kind in ("fresh", "again"):
    for moves in range(1, 20):
        out = base / f"cut-{{kind}}-{{moves}}"
        shutil.copytree(base / kind, out)
        child = os.fork()
        if not child:
            die_after(moves)
            trainer(out, store).train()
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL, status
    print(kind, moves - 1)
"""


def trainer(out, store):
    config = recipe(out, "eagle3", max_steps=2, checkpoint_every=2, log_every=2)
    return Trainer(config, tiny_target(), store, evaluate=lambda _: {"chat": {"acceptance_length": 1.5}})


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Runs that have all but their head, in a new folder and in one with another head; and a whole one."""
    base = tmp_path_factory.mktemp("runs")
    (base / "store").mkdir()
    store = greedy_store(base / "store", tiny_target())
    whole = trainer(base / "whole", store).train()
    for kind in ("fresh", "again"):
        shutil.copytree(whole, base / kind)
        for name in HEAD:
            (base / kind / name).unlink()
    other = recipe(base / "other", "peagle", max_steps=1)
    other = Trainer(other, tiny_target(), store).train()
    for name in HEAD:
        shutil.copy(other / name, base / "again")
    return base


@pytest.mark.slow
def test_killed_between_any_two_moves(base):
    from eyas.data.store import TokenStore

    here = Path(__file__).parent
    code = CHILD.format(
        paths=[str(here), str(here.parents[1])], store=str(base / "store"), base=str(base), head=HEAD
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    # config.json goes, if it was there; three moves; eyas.json again with what decoding came to.
    assert done.stdout.splitlines() == ["fresh 5", "again 5"]

    target, store = tiny_target(), TokenStore.load(base / "store")
    whole = {name: (base / "whole" / name).read_bytes() for name in ("model.safetensors", "config.json")}
    num_heads = 0
    for out in sorted(base.glob("cut-*")):
        refuse_foreign(out)
        weights = target.decoder.embed_tokens.weight
        if (out / "config.json").exists():
            num_heads += 1
            assert {name: (out / name).read_bytes() for name in whole} == whole
            load_head(out, target.config, weights, identity=target.identity)
        else:
            with pytest.raises(ModelFormatError, match=r"config\.json is missing"):
                load_head(out, target.config, weights, identity=target.identity)
        trainer(out, store).train()
        assert {name: (out / name).read_bytes() for name in whole} == whole
        assert b"acceptance_length" in (out / "eyas.json").read_bytes()
        assert not list(out.glob(".*")), "nothing half written stays"
    # Killed after config.json came, or after the second eyas.json, or not at all.
    assert num_heads == 6
