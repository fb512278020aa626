"""Fingerprint and provenance: stable, and without secrets."""

from __future__ import annotations

import sys

import pytest

from kvstudy.measure import fingerprint


def test_the_fingerprint_is_stable() -> None:
    assert fingerprint.fingerprint() == fingerprint.fingerprint()
    assert fingerprint.stable()["cores"] >= 1
    other = {**fingerprint.stable(), "cpu": "another"}
    assert fingerprint.fingerprint(other) != fingerprint.fingerprint()


def test_what_looks_like_a_secret_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["python", "--api-key", "sk-123", "--hf-token=abc", "HF_TOKEN=x", "--tokenizer", "t", "--seed", "3"]
    monkeypatch.setattr(sys, "orig_argv", words)
    shown = fingerprint.command()
    assert shown == ["python", "--api-key", "***", "--hf-token=***", "HF_TOKEN=***", "--tokenizer", "t", "--seed", "3"]


def test_packages_and_conditions() -> None:
    assert fingerprint.packages()["numpy"]
    assert len(fingerprint.volatile()["load_average"]) == 3
    assert set(fingerprint.commit()) == {"commit", "dirty"}
