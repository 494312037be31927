"""The comparison on a real model: what the table says must hold together."""

import json

import pytest

from eyas.cli.main import main


@pytest.mark.model
@pytest.mark.slow
def test_lookup_on_smollm2_gives_the_same_tokens(capsys, smollm2_path):
    with pytest.raises(SystemExit) as leave:
        main([
            *("compare", "--target", str(smollm2_path), "--device", "cpu"),
            *("--also", "prompt_lookup", "-k", "4"),
            *("--num-prompts", "2", "--max-tokens", "24", "--rounds", "1", "--json"),
        ])  # fmt: skip
    assert not leave.value.code
    document = json.loads(capsys.readouterr().out)
    plain, lookup = document["methods"]
    assert lookup["identical"]
    assert plain["num_tokens"] == lookup["num_tokens"] > 0
    assert lookup["num_steps"] <= plain["num_steps"]
    example = document["example"]["answers"]
    assert example["plain"]["text"] == example["prompt_lookup K=4"]["text"]
    assert "".join(example["plain"]["pieces"]) == example["plain"]["text"]
