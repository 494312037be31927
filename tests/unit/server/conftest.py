import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")


@pytest.fixture(scope="module")
def served():
    from served import Served

    with Served() as running:
        yield running
