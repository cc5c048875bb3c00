"""Tables of images: columns, spellings of a table, and everything that may be wrong with one."""

import os

import pytest
from PIL import Image

from harmonium.core.errors import ConfigError, DataError
from harmonium.data.datasets import datasets
from harmonium.data.decoding import pool


@pytest.fixture(autouse=True)
def surroundings(home, monkeypatch):
    """A home of its own, and no decoding processes, which take longer to start than to decode."""
    monkeypatch.setattr(pool, "_cores", lambda: 0)


@pytest.fixture
def table(tmp_path):
    """Write a table beside eight images, whose red is their number, and load it."""
    folder = tmp_path / "photos"
    (folder / "deep").mkdir(parents=True)
    for number in range(8):
        Image.new("RGB", (4, 4), (number, 0, 0)).save(folder / f"{number}.png")
    Image.new("RGB", (4, 4), (8, 0, 0)).save(folder / "deep" / "ä, b.png")

    def load(text, **settings):
        content = text if isinstance(text, bytes) else text.encode()
        (folder / "list.csv").write_bytes(content)
        settings = {"path": str(folder / "list.csv"), "validation": 0, "test": 0, **settings}
        return datasets["csv"](**settings).load()

    load.folder = folder
    return load


def column(images, name=None):
    """A column by image: the order of the images does not matter."""
    values = images.labels if name is None else images.factors[name]
    return dict(zip(images.pixels[:, 0, 0, 0].tolist(), values.tolist(), strict=True))


FULL = """path,client,label,domain,age
0.png,anna,cat,photo,3
1.png,bert,dog,photo,40
2.png,anna,dog,drawing,5
deep/../3.png,carl,cat,drawing,60
"""


def test_all_columns(table):
    data = table(FULL)
    assert data.classes == ("cat", "dog") and column(data.train) == {0: 0, 1: 1, 2: 1, 3: 0}
    assert data.names == {"client": ("anna", "bert", "carl"), "style": ("drawing", "photo")}
    assert column(data.train, "client") == {0: 0, 1: 1, 2: 0, 3: 2}
    assert column(data.train, "style") == {0: 1, 1: 1, 2: 0, 3: 0}
    assert column(data.train, "age") == {0: 3, 1: 40, 2: 5, 3: 60}
    assert data.notes == ()


@pytest.mark.parametrize(
    "text",
    [
        FULL.replace(",", ";"),
        FULL.replace(",", "\t"),
        FULL.replace("\n", "\r\n"),
        "\ufeff" + FULL,
        FULL.replace("anna", '"anna"').replace(",dog", ', "dog"').replace(', "', ',"'),
        FULL.replace(",", " , "),
        FULL.replace("\n", "\n\n") + "\n,,,,\n",
    ],
    ids=["semicolon", "tab", "crlf", "bom", "quotes", "spaces", "blank lines"],
)
def test_spellings_of_the_same_table(table, text):
    assert table(text).digest == table(FULL).digest


def test_quoted_names_with_everything_in_them(table):
    data = table('label,path\n"a ""b"", c","deep/ä, b.png"\n')
    assert data.classes == ('a "b", c',) and column(data.train) == {8: 0}


def test_only_paths(table):
    data = table("path\n5.png\n6.png\n")
    assert column(data.train) == {5: -1, 6: -1} and data.classes == ()
    assert data.train.factors == {} and data.names == {} and data.notes == ()


def test_empty_values_are_unknown_and_counted(table):
    data = table("path,client,label,domain,age\n0.png,,,,\n1.png,anna,,,7\n2.png,anna,cat\n")
    assert column(data.train) == {0: -1, 1: -1, 2: 0} and data.classes == ("cat",)
    assert column(data.train, "client") == {0: -1, 1: 0, 2: 0}
    assert "style" not in data.train.factors  # a column without any value is none
    assert column(data.train, "age") == {0: -1, 1: 7, 2: -1}
    assert [note.partition(",")[0] for note in data.notes] == [
        "2 of 3 images have no label",
        "1 of 3 images have no client",
        "2 of 3 images have no age",
    ]


def test_numbers_are_sorted_as_numbers(table):
    data = table("path,label,client\n0.png,10,7\n1.png,9,12\n2.png,-1,7\n")
    assert data.classes == ("-1", "9", "10") and column(data.train) == {0: 2, 1: 1, 2: 0}
    assert data.names["client"] == ("7", "12") and column(data.train, "client") == {
        0: 0,
        1: 1,
        2: 0,
    }


def test_other_columns_need_whole_numbers(table):
    text = "path,a,b,c,,d\n0.png,1,1.5,,0,99999999999999999999\n1.png,-2,2,,1,3\n"
    assert set(table(text).train.factors) == {"a"}


def test_columns_by_other_names(table):
    text = "file,who,what,where\n0.png,x,cat,here\n1.png,y,dog,there\n"
    names = {"path": "file", "client": "who", "label": "what", "domain": "where"}
    data = table(text, **{f"{key}_column": value for key, value in names.items()})
    assert data.classes == ("cat", "dog")
    assert data.names == {"client": ("x", "y"), "style": ("here", "there")}
    one = table(text, path_column="file", client_column="where", domain_column="where")
    assert one.names["client"] == one.names["style"] == ("here", "there")


def test_parts(table):
    text = "path,part\n0.png,train\n1.png,Test\n2.png,val\n3.png,\n4.png,validation\n"
    data = table(text, validation=0.5, test=0.5)
    found = [sorted(column(part)) for part in (data.train, data.validation, data.test)]
    assert found == [[0, 3], [2, 4], [1]]
    data = table(text.replace("1.png,Test\n", ""))
    assert sorted(column(data.test)) == [2, 4] and len(data.validation) == 0


def test_paths_start_from_the_root(table, tmp_path):
    text = f"path\n../3.png\n{table.folder}/4.png\n"
    data = table(text, root=str(table.folder / "deep"))
    assert sorted(column(data.train)) == [3, 4]
    with pytest.raises(DataError, match="data.root=.*no such folder"):
        table(text, root=str(tmp_path / "nowhere"))


def test_missing_and_broken_files_count_as_corrupt(table):
    (table.folder / "1.png").write_text("")
    os.mkfifo(table.folder / "pipe.png")
    text = "path,client\n0.png,a\ngone.png,a\n1.png,b\npipe.png,b\n\x00.png,b\n"
    with pytest.raises(DataError) as caught:
        table(text)
    assert "4 of 5 images cannot be read: line 3: gone.png (no such file or directory), " in str(
        caught.value
    )
    data = table(text, corrupt="skip")
    assert column(data.train, "client") == {0: 0} and data.names["client"] == ("a", "b")
    with pytest.raises(DataError, match="cannot be read"):
        table(text)  # also now that the others are decoded
    (note,) = data.notes
    assert "line 4: 1.png (empty), line 5: pipe.png (not a file)" in note


def test_a_change_is_noticed(table):
    digests = [table(FULL).digest, table(FULL.replace("anna", "adam")).digest]
    Image.new("RGB", (4, 4), (99, 0, 0)).save(table.folder / "0.png")
    os.utime(table.folder / "0.png", ns=(1, 1))
    data = table(FULL)
    assert 99 in column(data.train) and len({*digests, data.digest}) == 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ("path,label\n", "lists no images"),
        ("file,label\n0.png,cat\n", "no column 'path', only file, label: .*data.path_column"),
        ("path,a,a\n0.png,1,2\n", "names a column twice"),
        ("path,label\n0.png,cat\n,dog\n,cow\n", "no path in line 3, 4$"),
        ("path\n0.png\n1.png\ndeep/../0.png\n", r"twice, in line 4 as 2 \(deep/../0.png\)"),
        ("path,part\n0.png,tain\n", r"neither train, validation nor test in line 2 \(tain\)"),
        ("path\n0.png,cat\n", r"has 1 columns, but more values in line 2 \(2\)"),
        ('path\n"0.png\n', "table: line"),
        ("path\n" + "\n" * 3 + "x" * 200_000 + "\n", "line 5: field larger"),
        ("path\n0.png\n\xff.png\n".encode("latin-1"), r"is not UTF-8 text \(line 3\)"),
        ("path,domain,style\n0.png,a,1\n", "column 'style' and another one"),
        ("path\n" + "\n".join([",", *["0.png"] * 9]), "0.png.* and 3 more"),
    ],
)
def test_tables_that_are_refused(table, text, says):
    with pytest.raises(DataError, match=says) as caught:
        table(text)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_settings_that_are_refused(table):
    with pytest.raises(ConfigError, match="data.label_column=what: .*only path, client, label"):
        table(FULL, label_column="what")
    with pytest.raises(ConfigError, match="needs data.path"):
        table(FULL, path="")
    with pytest.raises(DataError, match="data=folder"):
        table(FULL, path=str(table.folder))
    with pytest.raises(DataError, match="no such file"):
        table(FULL, path=str(table.folder / "other.csv"))
