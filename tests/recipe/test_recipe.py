import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from harmonium.cli.main import main
from harmonium.core.callbacks import Callback
from harmonium.core.errors import ConfigError, DataError
from harmonium.data.partition import make_split
from harmonium.federation.method import Method
from harmonium.federation.sampling import Participation
from harmonium.learning.encoders.cnn import CnnSmall
from harmonium.learning.objectives.simclr import SimCLR
from harmonium.learning.terms.proximal import Proximal
from harmonium.methods.fedavg import FedAvg
from harmonium.methods.fedprox import FedProx
from harmonium.recipe.presets import read_yaml, shipped_recipes
from harmonium.recipe.schema import Recipe
from harmonium.runs.open_run import load_public, make_runtime, open_runtime
from harmonium.runs.start import _begin, run
from harmonium.storage.run_folder import RunFolder


def test_words_of_the_command_line_become_settings() -> None:
    words = "objective=simclr data.limit=500 encoder=cnn-small clients=10 split=dirichlet"
    recipe = Recipe.of("fedavg", *words.split(), "split.alpha=0.3", "local.lr=1e-3", "rounds=7")
    assert (recipe.data.limit, recipe.clients, recipe.rounds) == (500, 10, 7)
    assert recipe.split.alpha == 0.3  # type: ignore[attr-defined]
    assert recipe.local.lr == 1e-3


def test_a_resolved_recipe_reads_back_as_itself() -> None:
    words = ["terms.proximal.mu=0.5", "views.blur=0.5", "split=by_class", "server=adam"]
    recipe = Recipe.of("fedavg", *words, "local.clip=3", "encoder.width=8", "views.mean=[0.1]")
    again = Recipe.from_tree(__import__("yaml").safe_load(recipe.yaml()))
    assert again.tree() == recipe.tree()
    assert again.digest == recipe.digest
    assert again.terms == (Proximal(0.5),)


def test_the_digest_is_of_what_changes_results() -> None:
    plain = Recipe.of("fedavg")
    assert Recipe.of("fedavg", "engine.workers=7").digest == plain.digest
    for word in ("seed=1", "local.lr=0.07", "data.limit=9", "evaluate.k=3", "views.flip=0.1"):
        assert Recipe.of("fedavg", word).digest != plain.digest, word


def test_settings_added_since_leave_the_digest_of_earlier_recipes() -> None:
    """The digest that version 0.2.0 gave; runs that it began go on."""
    plain = Recipe.of("fedavg")
    assert plain.digest.startswith("2d10970e")
    assert Recipe.of("fedavg", "local.max_steps=1").digest != plain.digest


def test_files_say_the_same_as_words(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("method: fedavg\ndata: {name: digits, limit: 300}\nrounds: 3\n")
    assert Recipe.of(str(path)).digest == Recipe.of("fedavg", "data.limit=300", "rounds=3").digest
    assert Recipe.of(str(path), "rounds=4").rounds == 4


def test_another_choice_drops_the_settings_of_the_first(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("split: {name: dirichlet, alpha: 0.5}\n")
    assert Recipe.of(str(path), "split=by_class").split.name == "by_class"
    assert Recipe.of(str(path), "split=dirichlet").split.alpha == 0.5  # type: ignore[attr-defined]


BOTH = r"participation\.fraction=.* and participation\.number=3 exclude each other: leave out"


@pytest.mark.parametrize(
    "settings",
    [
        {"participation.fraction": 0.5, "participation.number": 3},
        {"participation.fraction": 1, "participation.number": "3"},
        {"participation": {"fraction": 0.5, "number": 3}},
        {"participation": Participation(fraction=0.5, number=3)},
    ],
)
def test_a_share_beside_a_number_of_clients_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=BOTH):
        Recipe.of("fedavg", **settings)


def test_one_file_says_a_share_or_a_number_of_clients(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("participation: {fraction: 0.5, number: 3}\n")
    monkeypatch.setattr(sys, "argv", ["harmonium", "run", str(path), "--dry-run"])
    with pytest.raises(SystemExit, match="2"):
        main()
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and re.search(BOTH, said)
    assert Recipe.of(str(path), "participation.number=2").participation == Participation(number=2)
    path.write_text("participation: {fraction: 1.0, number: 3}\n")  # as a resolved recipe has it
    assert Recipe.of(str(path)).participation.number == 3


def test_a_share_replaces_a_number_of_clients_and_the_reverse() -> None:
    number, share = Participation(number=3, quorum=2), Participation(fraction=0.5, quorum=2)
    for held, word, wanted in (
        (number, "participation.fraction=0.5", share),
        (share, "participation.number=3", number),
        (number, "participation.number=none", Participation(quorum=2)),
        (number, "participation.fraction=1", Participation(quorum=2)),
    ):
        recipe = Recipe.of("fedavg", participation=held)
        assert Recipe.of(recipe, word).participation == wanted, word
    both = ("participation.fraction=0.5", "participation.number=none")
    assert Recipe.of("fedavg", *both).participation == Participation(fraction=0.5)
    row = Recipe.of("fsimclr/c10-label/spectral+uv@cpu", "participation.fraction=0.2")
    assert (row.participation.fraction, row.participation.number) == (0.2, None)


def test_a_run_that_began_with_a_share_and_a_number_can_be_read_and_trained_further() -> None:
    tree = {**Recipe.of("fedavg").tree(), "participation": {"fraction": 0.5, "number": 3}}
    began = Recipe.from_tree(tree)
    assert began.tree()["participation"]["fraction"] == 0.5
    assert Recipe.of(began, "rounds=30").participation == began.participation


@pytest.mark.parametrize(
    ("key", "wanted"),
    [
        ("rounds", "a whole number"),
        ("clients", "a whole number"),
        ("seed", "a whole number"),
        ("local.epochs", "a whole number"),
        ("local.lr", "a number"),
        ("local.clip", "a number"),
        ("participation.number", "a whole number"),
        ("encoder.width", "a whole number"),
        ("terms.proximal.mu", "a number"),
        ("evaluate.labels_per_class", "a whole number"),
    ],
)
def test_truth_values_are_no_numbers(key: str, wanted: str, tmp_path: Path) -> None:
    words = ("[true]", "[no]") if key.endswith("per_class") else ("true", "yes", "off")
    for word in words:
        with pytest.raises(ConfigError, match=rf"{key}=\S+: should be {wanted}"):
            Recipe.of("fedavg", f"{key}={word}")
        with pytest.raises(ConfigError, match=rf"{key}=\S+: should be {wanted}"):
            Recipe.of("fedavg", **{key: word})
        path = tmp_path / "mine.yaml"
        *sections, name = key.split(".")
        opened = "".join(f"{section}: {{" for section in sections)
        path.write_text(f"{opened}{name}: {word}{'}' * len(sections)}\n")
        with pytest.raises(ConfigError, match=rf"{key}=\S+: should be {wanted}"):
            Recipe.of(str(path))
    with pytest.raises(ConfigError, match=f"{key}=.*: should be "):
        Recipe.of("fedavg", **{key: True})
    assert Recipe.of("fedavg", "evaluate.whiten=true").evaluate.whiten is True


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_are_valid(name: str) -> None:
    assert Recipe.of(name).tree()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fedavgg"], "'fedavgg'.*'fedavg'"),
        (["fedavg", "round=3"], "'round'.*'rounds'"),
        (["fedavg", "alpha=3"], "'alpha'.*'method.alpha'.*'split.alpha'"),
        (["fedavg", "local.lrr=3"], "'local.lrr'.*'local.lr'"),
        (["fedavg", "split.alpha=3"], "'split.alpha'.*split=iid.*split=dirichlet"),
        (["fedavg", "method.mu=3"], "'method.mu'.*method=fedavg"),
        (["fedavg", "data=digitz"], "'digitz'.*'digits'"),
        (["fedca", "public=/"], "public=/ .*public=folder public.path=/"),
        (["fedsimclr", "method=fedca", "objective=infonce"], "fedca needs public"),
        (["fedavg", "views=simcrl"], "'simcrl'.*'simclr'"),
        (["fedavg", "rounds=many"], "rounds=many"),
        (["fedavg", "local.epochs=1.5"], "local.epochs=1.5"),
        (["fedavg", "local.schedule=cosinus"], "local.schedule=cosinus.*cosine"),
        (["fedavg", "clients=0"], "clients is 0"),
        (["fedavg", "participation.number=11"], "participation.number is 11.* 10"),
        (["fedavg", "participation.fraction=2"], "participation.fraction is 2"),
        (["fedavg", "objective.temperature=0"], "objective.temperature is 0"),
        (["fedavg", "rounds"], "write key=value"),
        (["no/such.yaml"], "no/such.yaml"),
        (["nowhere.module:Thing"], "nowhere"),
        (["harmonium.core.errors:ConfigError"], "extends Method"),
    ],
)
def test_mistakes_are_named_with_what_would_be_right(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        Recipe.of(*words)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("base", ["fedavg", "fedsc", FedAvg, f"{FedAvg.__module__}:FedAvg"])
@pytest.mark.parametrize("given", ["method=fedprox", "method.name=fedprox", {"method": FedProx}])
def test_a_method_and_another_method_are_refused(base: object, given: object) -> None:
    words, settings = ([given], {}) if isinstance(given, str) else ([], given)
    with pytest.raises(ConfigError, match="^method .*twice.*(?i:fedavg|fedsc).*(?i:fedprox)"):
        Recipe.of(base, *words, **settings)  # type: ignore[arg-type]


def test_one_method_twice_and_the_method_of_a_recipe_may_be_given(tmp_path: Path) -> None:
    assert Recipe.of("fedprox", "method=fedprox", "method.mu=3").method.options["mu"] == 3
    assert Recipe.of(FedProx, method="fedprox").method.cls is FedProx
    assert Recipe.of("fedsc", method="fedsc").digest == Recipe.of("fedsc").digest
    (tmp_path / "mine.yaml").write_text("method: fedavg\nrounds: 3\n")
    for base in ("fedsimclr", "digits", str(tmp_path / "mine.yaml"), Recipe.of("fedavg")):
        assert Recipe.of(base, "method=fedprox").method.cls is FedProx


@pytest.mark.parametrize("command", ["run", "compare", "tune", "sweep", "diagnose", "explain"])
def test_every_command_refuses_two_methods(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"tune": ["grid.local.lr=0.1,0.2"], "sweep": ["sweep.local.lr=0.1,0.2"]}
    words = [command, "fedavg", "method=fedprox", *more.get(command, [])]
    monkeypatch.setattr(sys, "argv", ["harmonium", *words])
    with pytest.raises(SystemExit, match="2"):
        main()
    said = " ".join(capsys.readouterr().err.split())
    assert re.search("method .*twice.*fedavg.*fedprox", said)


def test_broken_yaml_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text("rounds: 3\nlocal: {lr: 1\n")
    with pytest.raises(ConfigError, match="broken.yaml line 3"):
        Recipe.of(str(path))


def test_yaml_cannot_run_code(tmp_path: Path) -> None:
    path = tmp_path / "evil.yaml"
    path.write_text(f"rounds: !!python/object/apply:os.mkdir [{tmp_path / 'canary'}]\n")
    with pytest.raises(ConfigError):
        Recipe.of(str(path))
    assert not (tmp_path / "canary").exists()


def test_terms_can_be_named_and_set() -> None:
    assert Recipe.of("fedavg", "terms=proximal", "terms.proximal.mu=0.1").terms == (Proximal(0.1),)
    assert Recipe.of("fedavg", "terms=proximal").terms == (Proximal(),)


def test_paths_of_data_do_not_depend_on_where_one_stands() -> None:
    path = Path(Recipe.of("fedavg", "data=folder", "data.path=images").data.path)  # type: ignore
    assert path.is_absolute() and path.name == "images"
    for section in ("data", "public"):
        given = [f"{section}=styles", f"{section}.sets=[mnist, some/usps.npz, ~/svhn.npz]"]
        name, *files = getattr(Recipe.of("fedavg", *given), section).sets
        assert name == "mnist"
        assert files == [
            str(Path("some/usps.npz").absolute()),
            str(Path("~/svhn.npz").expanduser()),
        ]


@dataclass(frozen=True)
class Wide(CnnSmall):
    """An encoder of someone else's."""

    extra: int = 3


def test_what_is_not_ours_is_called_by_its_import_path() -> None:
    recipe = Recipe.from_tree({"encoder": Wide(width=4, out=16, extra=5)})
    assert recipe.tree()["encoder"]["name"] == f"{__name__}:Wide"
    again = Recipe.from_tree(recipe.tree())
    assert again.encoder == recipe.encoder and type(again.encoder) is Wide
    assert again.digest == recipe.digest != Recipe.of("fedavg", "encoder.width=4").digest


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"encoder": SimCLR()}, "encoder is SimCLR"),
        ({"local": Participation()}, "local is"),
        ({"terms": [{"name": "proximal", "mu": 1}, {"name": "proximal", "mu": 2}]}, "twice"),
        ({"encoder": "nowhere:Net"}, "cannot import encoder"),
        ({"encoder": "harmonium.learning.objectives.simclr:SimCLR"}, "extends Encoder"),
        ({"method": "__main__:Mine"}, "engine.workers=0"),
        ({"views": 5}, "views is 5"),
        ({"method": 5}, "method is 5"),
        ({"terms": 5}, "terms is 5"),
    ],
)
def test_what_cannot_be_found_again_is_refused(settings: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Recipe.from_tree(settings)


@pytest.mark.parametrize(
    "word",
    [
        "local.momentum=-1", "local.weight_decay=-1", "local.clip=-1", "local.clip=0",
        "local.lr=.nan", "objective.hidden=-1", "objective.out=0", "terms.proximal.mu=-1",
        "evaluate.temperature=.nan", "evaluate.health=1", "evaluate.labels_per_class=[0]",
        "server=adam server.beta1=1", "server=sgd server.lr=0", "server=adam server.epsilon=0",
        "rounds.x=3", "seed.y=1",
    ],
)  # fmt: skip
def test_values_that_cannot_be_right_are_refused_before_a_run(word: str) -> None:
    with pytest.raises(ConfigError):
        Recipe.of("fedavg", *word.split())


def test_the_side_of_a_preset_reaches_the_encoder() -> None:
    recipe = Recipe.of("fedavg", "views=fedstyle_224")
    assert recipe.build_method(recipe.data.load()).world.side == 224


@dataclass(frozen=True)
class Supervised(Method):
    """May see labels."""

    uses_labels = True


def test_public_images_come_without_labels_unless_declared(tmp_path: Path) -> None:
    for method, labelled in ((FedAvg, False), (Supervised, True)):
        recipe = Recipe.from_tree({"method": method, "public": "digits"})
        data = recipe.data.load()
        split = make_split(recipe.split, data, None, recipe.clients, recipe.seed)
        public = load_public(recipe, data.train.shape)
        host = make_runtime(recipe, data, split, tmp_path, public)
        assert host.public is not None and host.public.labelled is labelled
        assert not host.public.factors


def test_public_images_can_be_taken_back_by_a_word() -> None:
    assert Recipe.of("fedca", "method.strength=0", "public=none").public is None
    assert Recipe.of("fedca", "method.strength=0", "public=null").public is None


def test_public_images_that_changed_are_noticed(tmp_path: Path) -> None:
    recipe = Recipe.of("fedavg", "public=digits")
    _begin(tmp_path, recipe)
    open_runtime(tmp_path)
    RunFolder(tmp_path).write_about({**RunFolder(tmp_path).about(), "public": "another digest"})
    with pytest.raises(DataError, match="public images of .* have changed"):
        open_runtime(tmp_path)


def test_orchestras_rules_scale_local_training() -> None:
    words = ["clients=10", "local.epochs=4", "local.for_clients=10", "split.merge=2"]
    assert Recipe.of("fedavg", *words).known_method().local.epochs == 4
    assert Recipe.of("fedavg", *words, "seed=1").changed(clients=5).known_method().local.epochs == 2
    half = ["participation.fraction=0.5", "local.lr=0.1", "local.for_fraction=0.5"]
    for name in ("fedavg", "alone", "centralised"):  # the same budget for the references
        assert Recipe.of(name, *words, *half).known_method().local.lr == pytest.approx(0.1)
        assert Recipe.of(name, *words, *half).known_method().local.epochs == 4


def test_settings_without_effect_are_said() -> None:
    for words in (["server=adam"], ["transport.up=int8"]):
        (said,) = Recipe.of("alone", *words).notes
        assert "alone sends no model" in said and "server" in said and "transport" in said
    assert Recipe.of("alone").notes == [] == Recipe.of("fedavg", "server=adam").notes


def test_what_is_no_recipe_says_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("method: fedavg\n")
    (tmp_path / "bare").mkdir()
    for place, wanted in (
        (tmp_path, "harmonium resume"),
        (tmp_path / "bare", "is a folder.*harmonium start .*bare"),
        (tmp_path / "encoder.safetensors", "init="),
    ):
        with pytest.raises(ConfigError, match=wanted):
            Recipe.of(str(place))


def test_what_was_read_is_the_readers_own() -> None:
    """Texts are parsed once, and trees are changed by those who read them."""
    text = "local: {lr: 0.1}"
    read_yaml(text, "mine")["local"]["lr"] = 7
    assert read_yaml(text, "mine") == {"local": {"lr": 0.1}}


def test_scaled_epochs_are_said(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    undrawn: None,
) -> None:
    said = "local.epochs=10 is for 100 clients (local.for_clients): 1 epoch with 10 clients"
    assert Recipe.of("orchestra").notes == [said]
    assert Recipe.of("orchestra", "clients=25").notes[0].endswith(": 3 epochs with 25 clients")
    for words in (["clients=100"], ["local.for_clients=none"]):
        assert Recipe.of("orchestra", *words).notes == []
    monkeypatch.setattr(sys, "argv", ["harmonium", "run", "orchestra", "--dry-run"])
    main()
    assert said in " ".join(capsys.readouterr().err.split())

    class Noting(Callback):
        notes: list[str] = []

        def note(self, text: str) -> None:
            self.notes.append(text)

    small = ["clients=2", "rounds=1", "data.limit=80", "encoder.width=4", "evaluate.k=5"]
    small += ["local.epochs=3", "local.for_clients=4", "evaluate.labels_per_class=[]"]
    result = run("digits", *small, "engine.workers=0", out=tmp_path / "run", callbacks=Noting())
    said = "local.epochs=3 is for 4 clients (local.for_clients): 2 epochs with 2 clients"
    assert said in Noting.notes and said in result.notes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["scaffold", "local.optimiser=adam"], "local.optimiser is adam.*sgd"),
        (["fedprox", "method.mu=-1"], "method.mu is -1"),
        (["fedprox", "method.mu=.inf"], "method.mu is inf"),
        (["fedavg", "local.momentum=1"], "local.momentum is 1"),
        (["fedavg", "aggregation=trimmed", "clients=5"], r"aggregation.trim .* 5 clients .*0\.2$"),
        (["fedavg", "aggregation=trimmed", "clients=2"], "must be 0$"),
        (["fedavg", "participation.over=0.3"], "participation.over.* 10 clients"),
        (["fedavg", "objective.temperature=.inf"], "objective.temperature is inf"),
        (["fedavg", "batch_norm=mean"], "batch_norm=mean.*average"),
        (["fedavg", "objective=moco", "objective.queue_owner=mean"], "'local' or 'fresh'"),
        (["fedavg", "objective=moco", "objective.queue=0"], "objective.queue is 0"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_at_once(
    words: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Recipe.of(*words)


def test_no_terms_may_be_written_as_none() -> None:
    assert Recipe.of("fedavg", "terms=none").terms == ()


def _bomb(line: str) -> str:
    """Few lines of aliases, each ten times the one before."""
    lines = [line.format(number=n, before=",".join([f"*a{n - 1}"] * 10)) for n in range(1, 20)]
    return "\n".join(["a0: &a0 {b: 1}", *lines])


@pytest.mark.parametrize(
    "text",
    [
        "5: 1",
        "~: 1",
        "true: 1",
        "[1,2]: 3",
        "{a: 1}: 2",
        "local: {5: 1}",
        "rounds: " + "[" * 100_000,
        "- " * 10_000,
        "&a [*a]",
        "rounds: 2020-13-45",
        "rounds: " + "9" * 5000,
        "a: !!bool 7",
        "x" * 2_000_000,
        _bomb("a{number}: &a{number} [{before}]"),
        _bomb("a{number}: &a{number} {{<<: [{before}], c{number}: 1}}"),
        "\n".join(["a0: &a0 [x]", *(f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, 100))]),
    ],
    ids=lambda text: text[:12],
)
def test_a_strange_recipe_is_one_line_at_once(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    began = time.process_time()
    with pytest.raises(ConfigError, match="mine.yaml") as refused:
        Recipe.of(str(path))
    assert "\n" not in str(refused.value) and time.process_time() - began < 1
