"""The table of patches: an entry per file, with an installer, printed by ``info``."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest

import megatron_dsa
from megatron_dsa import patches
from megatron_dsa.config.extras import load_extra
from tests.host import small_config, small_csa_config, start

FOLDER = Path(patches.__file__).parent
MIXED = {"fp32 checkpoints, plain", "fp32 checkpoints"}


@pytest.fixture(scope="module", autouse=True)
def complete():
    start()
    load_extra("muon.patch", "--optimizer muon")


def test_every_file_of_the_folder_is_in_the_table():
    modules = {patch.installer.partition(":")[0] for patch in patches.TABLE.values()}
    files = {f"patches.{path.stem}" for path in FOLDER.glob("*.py")} - {"patches.__init__"}
    assert files == {module for module in modules if module.startswith("patches.")}


def test_every_installer_is_there():
    for patch in patches.TABLE.values():
        module, _, function = patch.installer.partition(":")
        assert callable(getattr(importlib.import_module(f"megatron_dsa.{module}"), function))


@pytest.mark.parametrize(
    ("config", "more"),
    [
        (small_config(), set()),
        (small_csa_config(4), MIXED),
        (small_config(hc_mult=2), {*MIXED, "stream pipelines", "prediction blocks"}),
        (small_config(mtp_num_layers=1), {"prediction without engine"}),
        (SimpleNamespace(moe_hash_layers=1), {"token ids"}),
        (
            SimpleNamespace(
                transformer_impl="transformer_engine", gradient_accumulation_fusion=True
            ),
            {"unfused linears"},
        ),
    ],
)
def test_layers_install_the_patches_that_they_need(config, more, monkeypatch):
    installed = set()
    monkeypatch.setattr(patches.Patch, "install", lambda patch, *_: installed.add(patch.installer))
    config = SimpleNamespace(**{"transformer_impl": "local"} | vars(config))
    patches.install_for_layers(config)
    names = {name for name, patch in patches.TABLE.items() if patch.installer in installed}
    always = {name for name, patch in patches.TABLE.items() if patch.by == "checkpoints"}
    always |= {"packed targets", "prediction loss", "Muon", "layer-wise gather"}
    assert names == always | more


def test_info_prints_it(capsys):
    from megatron_dsa.extras.cli import main

    main(["info"])
    said = capsys.readouterr().out
    assert megatron_dsa.__version__ in said
    for name, patch in patches.TABLE.items():
        assert f"  {name} ({patch.when}; " in said and patch.defect in said
