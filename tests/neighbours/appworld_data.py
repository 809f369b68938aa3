"""A small data set of ours for AppWorld: two tasks about one note, written with the package's own models. Run where AppWorld is installed.

APPWORLD_ROOT=FOLDER python -m appworld.cli install && APPWORLD_ROOT=FOLDER python tests/neighbours/appworld_data.py
"""

import json
import os
from pathlib import Path

from appworld.apps import get_all_apps
from appworld.collections.api_docs import ApiDocCollection
from appworld.collections.models import ModelCollection
from appworld.common.constants import CANARY_STRING, DB_VERSION

USER = {"first_name": "Ada", "last_name": "Example", "email": "ada.example@gmail.com", "phone_number": "5550100200"}
BORN = {"birthday": "1990-01-01", "sex": "female"}
PASSWORD = "open-sesame"
INSTRUCTION = "Which colour does my note 'Kitchen' name?"
TASKS = {"train": ("a000001_1", "green"), "dev": ("b000002_1", "blue")}
"""{data set: (task, what its note says)}"""
REQUIREMENT = "assert answers match."
EVALUATION = f'''
def evaluate(test, public_data, private_data, main_user, models, ground_truth_answer):
    with test("""{REQUIREMENT}"""):
        test.answer(models.end.supervisor.Task.find_one().answer, ground_truth_answer)
'''
TRUTH = {
    "metadata": {"difficulty": 1, "mode": "minimal", "num_apps": 1, "num_apis": 3, "num_api_calls": 4, "num_solution_code_lines": 4},
    "public_data": {},
    "private_data": {},
    "test_data": [{"requirement": REQUIREMENT, "label": "no_op_fail"}],
}


def main() -> None:
    """Write documentation, data bases, tasks, truths and the two lists below ``$APPWORLD_ROOT/data``."""
    data = Path(os.environ["APPWORLD_ROOT"]) / "data"
    apps = get_all_apps(skip_admin=True)
    documents = data / "api_docs" / "standard"
    documents.mkdir(parents=True)
    for app, interfaces in ApiDocCollection.build(load_apps=tuple(apps)).items():
        marked = {name: {**told, "canary_string": CANARY_STRING} for name, told in interfaces.items()}
        (documents / f"{app}.json").write_text(json.dumps(marked), encoding="utf-8")
    (data / "datasets").mkdir()
    for dataset, (task, colour) in TASKS.items():
        (data / "datasets" / f"{dataset}.txt").write_text(f"{task}\n", encoding="utf-8")
        write_task(data / "tasks" / task, apps, colour)


def write_task(folder: Path, apps: list[str], colour: str) -> None:
    """One world: a supervisor, her password, and her note that names the colour."""
    truth = folder / "ground_truth"
    truth.mkdir(parents=True)
    where = f":memory:{folder.name}"
    models = ModelCollection.load(to_db_home_path=where, from_db_home_path=where, load_apps=[*apps, "admin"], create_db=True)
    models.admin.MainUser(**USER, **BORN).save()
    supervisor = models.supervisor.Supervisor(**USER, **BORN)
    supervisor.save()
    models.supervisor.Task(supervisor_id=supervisor.id, instruction=INSTRUCTION).save()
    models.supervisor.AccountPassword(supervisor_id=supervisor.id, account_name="simple_note", password=PASSWORD).save()
    names = {key: USER[key] for key in ("first_name", "last_name", "email")}
    owner = models.simple_note.User(**names, password=PASSWORD, verified=True)
    owner.save()
    models.simple_note.Note(user_id=owner.id, title="Kitchen", content=f"Paint the kitchen {colour}.").save()
    models.save(db_home_path=str(folder / "dbs"), format="full", delete_if_exists=True)
    specification = {"instruction": INSTRUCTION, "supervisor": USER, "datetime": "2023-05-18T12:00:00", "db_version": DB_VERSION}
    (folder / "specs.json").write_text(json.dumps(specification), encoding="utf-8")
    for name, value in {**TRUTH, "answer": colour}.items():
        (truth / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    (truth / "evaluation.py").write_text(EVALUATION, encoding="utf-8")


if __name__ == "__main__":
    main()
