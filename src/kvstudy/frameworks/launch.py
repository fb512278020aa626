"""From a deployment to a server that is up: the one place that knows which module serves which framework."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

from pydantic import ValidationError

from kvstudy.frameworks.base import Launch, ServerProcess, Unavailable
from kvstudy.frameworks.lease import Lease
from kvstudy.grid.schema import Deployment, Visit, Vllm, content_hash
from kvstudy.grid.store import Layout


def read_visit(path: Path) -> Visit:
    """A visit as the plan wrote it.

    Raises
    ------
    Unavailable
        It is not there, or not a visit of this version.
    """
    try:
        return Visit.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise Unavailable(f"no visit {path}: `kvstudy grid study=NAME` plans them") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        wrong = f"{where}: {first['msg']}" if where else first["msg"]
        raise Unavailable(
            f"{path} is not a visit ({wrong}): delete {path.parent.parent} and plan again with "
            "`kvstudy grid study=NAME`; measured cells stay"
        ) from None


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
    api_key: str | None = None,
) -> ServerProcess:
    """The server of a deployment, not started yet."""
    try:
        card = json.loads((model_dir / "model.json").read_text(encoding="utf-8"))
    except ValueError:
        raise Unavailable(f"the model in {model_dir} is damaged: delete the folder and run again") from None
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
        api_key=api_key,
    )
    kind: type[ServerProcess]
    if isinstance(deployment.framework, Vllm):
        from kvstudy.frameworks.vllm import VllmServer as kind
    elif deployment.framework.implementation == "upstream":
        from kvstudy.frameworks.upstream.launcher import UpstreamServer as kind
    else:
        from kvstudy.frameworks.native import NativeServer as kind
    return kind(launch)
