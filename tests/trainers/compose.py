"""Builds verl's optimizer settings from command-line overrides as its trainers do, without training anything.

Reads cases as JSON from standard input, answers as JSON on standard output. Each case has a process of its own. Where
an error says what to type, the answer has ``mended``: what came of typing it.
"""

import dataclasses
import json
import os
import pickle
import shlex
import sys
from pathlib import Path

ADVICE = "All of it in one line:\n"


def answer(case: dict) -> dict:
    exec(case.get("before", ""), {})
    from hydra import compose, initialize_config_dir
    from verl.trainer import sft_trainer
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.engine.base import EngineRegistry

    os.environ.update(case.get("environment", {}))
    directory = case.get("directory") or str(Path(sft_trainer.__file__).parent / "config")
    try:
        with initialize_config_dir(directory, version_base=None):
            config = compose(case.get("config", "sft_trainer_engine"), overrides=case["overrides"])
        for key in case.get("at", "optim").split("."):
            config = config[key]
        optim = omega_conf_to_dataclass(config)
    except Exception as error:
        told = {"error": str(error), "type": type(error.__cause__ or error).__name__}
        if ADVICE in str(error) and "advice" not in case:
            told["advice"] = shlex.split(str(error).split(ADVICE)[1].splitlines()[0])
            overrides = [*case["overrides"], *told["advice"]]
            told["mended"] = answer({**case, "overrides": overrides, "advice": told["advice"]})
        return told
    engine = EngineRegistry.get_engine_cls("language_model", "fsdp2")
    return {
        "class": f"{type(optim).__module__}.{type(optim).__qualname__}",
        "fields": {field.name: getattr(optim, field.name) for field in dataclasses.fields(optim)},
        "engine": f"{engine.__module__}.{engine.__qualname__}",
        "keys": list(config),
        "pickle": pickle.dumps(optim).hex(),
    }


def main() -> None:
    # once, before the forks
    import bwdfuse.trainers._verl_engine  # noqa: F401

    answer({"overrides": []})
    answers = []
    for case in json.load(sys.stdin):
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.write(writer, json.dumps(answer(case), default=str).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as stream:
            answers.append(json.loads(stream.read()))
        os.wait()
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
