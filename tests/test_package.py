import subprocess
import sys


def run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)


def test_import_needs_torch_and_numpy_only():
    blocked = "timm torchvision accelerate torchmetrics jsonargparse rich matplotlib tensorboard safetensors PIL yaml "
    blocked += "transformers"
    code = f"""
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked.split()!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
import importlib.util
original = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in {blocked.split()!r} else original(name, package)
import torch, fibottention
pattern = fibottention.Fibottention().pattern(3, 20)
x = torch.randn(1, 3, 20, 4)
print(fibottention.sparse_attention(x, x, x, pattern).shape)
try:
    fibottention.sparsify
except ImportError as error:
    print(error)
"""
    result = run(code)
    assert result.returncode == 0, result.stderr
    assert "torch.Size([1, 3, 20, 4])" in result.stdout
    assert "pip install 'fibottention[train]'" in result.stdout


def test_command_without_its_packages_says_what_to_install():
    code = """
import sys
sys.modules["jsonargparse"] = None
from fibottention.cli import main
print(main(["train"]))
"""
    result = run(code)
    assert "needs the package jsonargparse; install it with: pip install 'fibottention[train]'" in result.stderr
    assert result.stdout.strip() == "2"


def test_models_are_registered_on_import():
    result = run("import fibottention, timm; print(timm.list_models('fibottention_*'))")
    for name in ("vit_tiny_patch16_224", "vit_base_patch16_224", "swin_base_patch4_window7_224", "convit_base"):
        assert f"fibottention_{name}" in result.stdout
