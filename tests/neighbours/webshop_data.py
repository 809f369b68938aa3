"""A shop of six products of ours for WebShop, and stand-ins for what its repository asks for beyond ordinary packages.

`write_data` fills a checkout's ``data`` folder. `write_stand_ins` writes modules: pyserini needs Java (here words are counted), spacy a
model that is in no registry (here all words are nouns), gym does not go with numpy 2 (here gymnasium), cleantext is imported
and not used.
`write_shop` writes a ``web_agent_site`` of the same interface, for machines without a checkout.
"""

from __future__ import annotations

import json
from pathlib import Path

PRODUCTS = {
    "B000000001": ("steel mug", "kitchen", ["red", "blue"], "$12.99"),
    "B000000002": ("clay mug", "kitchen", ["red", "green"], "$8.00"),
    "B000000003": ("wool scarf", "clothes", ["red", "blue"], "$25.00 to $35.00"),
    "B000000004": ("silk scarf", "clothes", ["blue", "green"], "$45.00"),
    "B000000005": ("oak lamp", "lights", ["green", "blue"], "$60.00 to $90.00"),
    "B000000006": ("paper lamp", "lights", ["red", "green"], "$15.00"),
}
"""{number: (name, kind, colours, price)}; each is asked for in its first colour."""


def instruction(number: str) -> str:
    """What is asked for of a product, before the price."""
    name, _, colours, _ = PRODUCTS[number]
    return f"i want a {name} in {colours[0]}"


def write_data(folder: Path) -> None:
    """Products, attributes and instructions, as WebShop's set-up leaves them."""
    folder.mkdir(parents=True)
    products = [
        {
            "asin": number, "category": kind, "query": name.split()[1], "product_category": f"home › {kind}", "name": name,
            "full_description": f"A {name}.", "small_description": [f"This is a {name}."], "pricing": price.replace(" to ", ""),
            "customization_options": {"color": [{"value": colour, "image": None} for colour in colours]}, "images": ["none.jpg"],
        }
        for number, (name, kind, colours, price) in PRODUCTS.items()
    ]  # fmt: skip
    asked = {
        number: [{"instruction": instruction(number), "instruction_attributes": [name.split()[0]], "instruction_options": [colours[0]]}]
        for number, (name, _, colours, _) in PRODUCTS.items()
    }
    attributes = {number: {"attributes": [name.split()[0]]} for number, (name, _, _, _) in PRODUCTS.items()}
    for name, content in (("items_shuffle_1000", products), ("items_human_ins", asked), ("items_ins_v2_1000", attributes)):
        (folder / f"{name}.json").write_text(json.dumps(content))


_LUCENE = '''
import json
from pathlib import Path
from types import SimpleNamespace


class LuceneSearcher:
    """Products by how many of the words stand in their names."""

    def __init__(self, index):
        found = json.loads((Path(index).parents[1] / "data" / "items_shuffle_1000.json").read_text())
        self._names = {product["asin"]: product["name"].split() for product in found}

    def search(self, words, k):
        matches = {number: sum(word in name for word in words.split()) for number, name in self._names.items()}
        best = sorted((number for number in matches if matches[number]), key=lambda number: (-matches[number], number))
        return [SimpleNamespace(docid=number) for number in best[:k]]

    def doc(self, number):
        return SimpleNamespace(raw=lambda: json.dumps({"id": number}))
'''
_SPACY = """
from types import SimpleNamespace


def load(name):
    return lambda text: [SimpleNamespace(text=word, pos_="NOUN") for word in text.split()]
"""


def write_stand_ins(folder: Path) -> None:
    """Modules that a checkout imports."""
    modules = {"pyserini/search/lucene.py": _LUCENE, "spacy.py": _SPACY, "gym.py": "from gymnasium import Env\n"}
    for name, content in {**modules, "cleantext.py": ""}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


_SHOP = '''
import random
import re
from types import SimpleNamespace

from tests.neighbours.webshop_data import PRODUCTS, instruction


class Server:
    """Goals with price limits that are drawn when the shop opens, and a session for each name."""

    opened = 0

    def __init__(self):
        Server.opened += 1
        self.goals = [(number, f"{instruction(number)}, and price lower than {random.randint(10, 19)}0.00 dollars") for number in PRODUCTS]
        random.shuffle(self.goals)
        self.sessions = {}


class WebAgentTextEnv:
    def __init__(self, observation_mode, num_products, human_goals, server=None, session_prefix=""):
        self.server, self._prefix = server or Server(), session_prefix
        self.reset()

    def reset(self, session=None):
        goal = random.randrange(len(self.server.goals)) if session is None else session
        self._name = f"{self._prefix}{goal}"
        self.server.sessions[self._name] = SimpleNamespace(goal=goal, page="search", asin=None, colour=None)
        return self._text(), None

    def get_instruction_text(self):
        return "Instruction: " + self.server.goals[self._session.goal][1]

    def get_available_actions(self):
        page = self._session.page
        items = [number.lower() for number in self._found] if page == "results" else []
        colours = PRODUCTS[self._session.asin][2] if page == "item" else []
        buttons = {"search": ["search"], "results": ["back to search", *items], "item": ["buy now", *colours], "done": []}[page]
        return {"has_search_bar": page == "search", "clickables": buttons}

    def step(self, action):
        kind, _, given = re.fullmatch(r"(\\w+)(\\[(.*)\\])?.*", action, re.S).groups() if re.match(r"\\w+", action) else ("", "", "")
        session, reward, done = self._session, 0.0, False
        if kind == "search" and session.page == "search" and given:
            words = given.lower().split()
            self._found = [number for number, one in PRODUCTS.items() if set(one[0].split()) & set(words)]
            session.page = "results"
        elif kind == "click" and given in self.get_available_actions()["clickables"]:
            if given == "buy now":
                session.page, done = "done", True
                asked = self.server.goals[session.goal][0]
                right = [session.asin == asked, session.colour == PRODUCTS[asked][2][0], True]
                reward = sum(right) / 3
            elif given == "back to search":
                session.page = "search"
            elif given.upper() in PRODUCTS:
                session.page, session.asin, session.colour = "item", given.upper(), None
            elif given != "search":
                session.colour = given
        return self._text(), reward, done, None

    def close(self):
        pass

    @property
    def _session(self):
        return self.server.sessions[self._name]

    def _text(self):
        return f"WebShop [SEP] {self.get_instruction_text()} [SEP] {self._session.page}"
'''


def write_shop(folder: Path) -> None:
    """A ``web_agent_site`` that sells `PRODUCTS`."""
    path = folder / "web_agent_site" / "envs" / "web_agent_text_env.py"
    path.parent.mkdir(parents=True)
    path.write_text(_SHOP)
    (folder / "web_agent_site" / "engine").mkdir()
    for name in ("engine", "goal"):
        (folder / "web_agent_site" / "engine" / f"{name}.py").write_text("")
