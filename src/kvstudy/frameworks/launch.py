"""From a deployment to a server that is up: the one place that knows which module serves which framework."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

from kvstudy.frameworks.base import Launch, ServerProcess, Unavailable
from kvstudy.frameworks.lease import Lease
from kvstudy.grid.schema import Deployment, Vllm, content_hash
from kvstudy.grid.store import Layout


def model_folder(deployment: Deployment, layout: Layout) -> Path:
    """Folder of the deployment's prepared model.

    Raises
    ------
    Unavailable
        It has not been prepared.
    """
    folder = layout.model(f"{deployment.model.name}-{content_hash(deployment.model)}")
    if not (folder / "model.json").is_file():
        raise Unavailable(f"model '{deployment.model.name}' is not prepared ({folder}): run 'kvstudy prepare', or make")
    return folder


def environment_folder(deployment: Deployment, layout: Layout) -> Path | None:
    """Folder of the framework's own environment; None for those that run in the project's."""
    name = deployment.framework.environment
    if name is None:
        return None
    environments = importlib.import_module("kvstudy.frameworks.environments")
    flavour = environments.flavour_for(deployment.hardware.device)
    return layout.environment(f"{name}-{flavour}-{environments.key(name, flavour)}")


def make_server(
    deployment: Deployment,
    model_dir: Path,
    environment_dir: Path | None,
    work_dir: Path,
    lease: Lease,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
) -> ServerProcess:
    """The server of a deployment, not started yet."""
    card = json.loads((model_dir / "model.json").read_text(encoding="utf-8"))
    launch = Launch(
        deployment=deployment,
        model_dir=model_dir.resolve(),
        card=card,
        environment_dir=environment_dir.absolute() if environment_dir else None,
        work_dir=work_dir.absolute(),
        gpu_ids=lease.gpu_ids,
        pass_fds=lease.fds,
        host=host,
        port=port,
    )
    kind: type[ServerProcess]
    if isinstance(deployment.framework, Vllm):
        from kvstudy.frameworks.vllm import VllmServer as kind
    else:
        from kvstudy.frameworks.native import NativeServer as kind
    return kind(launch)
