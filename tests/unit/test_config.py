"""router/config.py: what is accepted, and that each rule rejects, by key path."""

import importlib.util
import json
import math
import os
from hashlib import sha256

import pytest

from router.config import (
    BACKENDS_LIMIT,
    FILE_LIMIT_BYTES,
    NOT_BUILT,
    STRATEGIES,
    Config,
    ConfigError,
    Fault,
    key_paths,
    load,
    parse,
    with_flags,
)
from tests.support.certificates import make_certificates


def config_of(text: str, environ: dict[str, str] | None = None) -> Config:
    return parse(text.encode(), environ=environ or {})


def faults_of(text: str | bytes, environ: dict[str, str] | None = None) -> tuple[Fault, ...]:
    with pytest.raises(ConfigError) as caught:
        parse(text if isinstance(text, bytes) else text.encode(), environ=environ or {})
    return caught.value.faults


def only_fault(text: str, environ: dict[str, str] | None = None) -> Fault:
    faults = faults_of(text, environ)
    assert len(faults) == 1, faults
    return faults[0]


def backend(lines: str) -> str:
    return f'[[backends]]\nurl = "http://a:1"\n{lines}\n'


# --- accepted --------------------------------------------------------------------------------------------------------


def test_an_empty_file_is_the_default_configuration():
    assert config_of("") == Config()


def test_values_of_the_file_arrive_in_their_attributes():
    config = config_of(
        """
        [server]
        port = 0
        metrics = false
        [routing]
        strategy = "kvaware"
        [routing.session]
        headers = ["X-Chat"]
        cookie = "sid"
        [limits]
        max_in_flight = 7
        [log]
        level = "debug"
        """
    )
    assert (config.server.port, config.server.metrics) == (0, False)
    assert config.routing.strategy == "kvaware"
    assert config.routing.session.headers == ("x-chat",)  # compared with lower-cased names
    assert config.routing.session.cookie == "sid"
    assert config.routing.session.body_fields == ("session_id", "user", "prompt_cache_key")
    assert config.limits.max_in_flight == 7
    assert config.log.level == "debug"


def test_a_whole_number_is_fine_where_a_number_is_expected_and_becomes_a_float():
    connect_s = config_of("[timeouts]\nconnect_s = 3").timeouts.connect_s
    assert connect_s == 3.0
    assert isinstance(connect_s, float)


def test_tables_are_read_like_bytes():
    assert parse({"server": {"port": 1}}, environ={}) == config_of("[server]\nport = 1")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_is_accepted(strategy):
    assert config_of(f'[routing]\nstrategy = "{strategy}"').routing.strategy == strategy


@pytest.mark.parametrize(
    ("given", "url", "name", "host", "port"),
    [
        ("http://10.0.0.7:8000", "http://10.0.0.7:8000", "10.0.0.7:8000", "10.0.0.7", 8000),
        ("http://vllm:8000/", "http://vllm:8000", "vllm:8000", "vllm", 8000),
        ("http://vllm", "http://vllm:80", "vllm:80", "vllm", 80),
        ("HTTP://Gpu_0.Cluster.Local:1", "http://gpu_0.cluster.local:1", "gpu_0.cluster.local:1", None, 1),
        ("http://[::1]:8000", "http://[::1]:8000", "[::1]:8000", "::1", 8000),
        ("http://[2001:db8::7]", "http://[2001:db8::7]:80", "[2001:db8::7]:80", "2001:db8::7", 80),
    ],
)
def test_a_backend_url_is_normalised_and_names_its_backend(given, url, name, host, port):
    only = config_of(f'[[backends]]\nurl = "{given}"').backends[0]
    assert (only.url, only.name, only.port) == (url, name, port)
    assert only.host == (host or "gpu_0.cluster.local")


def test_a_backend_keeps_what_the_file_says():
    only = config_of(backend('name = "gpu-0"\nweight = 2\nmodels = ["a", "b/c"]\nkv_events = "off"')).backends[0]
    assert (only.name, only.weight, only.models, only.kv_events) == ("gpu-0", 2.0, ("a", "b/c"), "off")


# --- each rule rejects -----------------------------------------------------------------------------------------------

REJECTED = {
    "server.host": ["5", '""', '"a b"', '"http://a"', '"1.2.3"', '"[::1]"', '"fe80::1%eth0"', '"-a"', '"a..b"'],
    "server.port": ["-1", "65536", "true", '"80"', "80.0"],
    "server.workers": ["0", "257", "2.0", "false"],
    "server.metrics": ["1", '"yes"'],
    "server.tls_cert": ["1", '""'],
    "server.tls_key": ["1", '""'],
    "admin.host": ["5", '"*"'],
    "admin.port": ["-1", "65536"],
    "admin.token_env": ["1", '"a-b"', '""'],
    "routing.strategy": ['"foo"', "1", '""', '["kvaware"]', '"KVAWARE"'],
    "routing.session.headers": ['"x"', str(["x"] * 17)],
    "routing.session.body_fields": ['"x"', str(["x"] * 17)],
    "routing.session.cookie": ["1", '"a b"', '"a=b"'],
    "routing.kvaware.tokenization": ['"on"', "true"],
    "routing.kvaware.tokenizer": ["1", '""', '"/nowhere"'],
    "routing.kvaware.token_wait_share": ["-0.1", "1.1", "true", '"1"'],
    "routing.line.batch_tokens": ["-1", "1.5", '"2048"'],
    "routing.kvaware.relearn": ["1", '"true"'],
    "routing.line.hold": ["true", '"yes"'],
    "kv_cache.l2": [
        "1",
        '"10.0.0.9:6379"',
        '"http://a:1"',
        '"redis://"',
        '"redis://a:0"',
        '"redis://a:99999"',
        '"redis://a:1/x"',
        '"redis://a:1/0?db=1"',
        '"redis://:s3cret@a:1"',
        '"redis://u:s3cret@a:1"',
    ],
    "kv_cache.l2_format": ['"other"', "1"],
    "kv_cache.l2_password_env": ["1", '"a-b"', '""'],
    "kv_cache.l2_tls_ca": ["1", '""'],
    "kv_cache.l2_hash_seed": ["-1", "4294967296", '"0"', "true"],
    "kv_cache.l2_time_limit_s": ["0", "11", "nan"],
    "models.aliases": ["1", '["a"]'],
    "models.tokenizers": ["1", '"x"'],
    "limits.max_body_bytes": ["0", "1023", "2147483648", "1e6", "true"],
    "limits.max_header_bytes": ["1023", "1048577"],
    "limits.max_connections": ["-1", "1000001", "0.5"],
    "limits.max_in_flight": ["-1", "1000001", "false"],
    "limits.max_in_flight_per_backend": ["-1", "1000001"],
    "limits.max_queue": ["-1", "1000001"],
    "limits.queue_timeout_s": ["0", "-1", "86401", "inf", "nan", '"30"', "true"],
    "timeouts.connect_s": ["0", "inf"],
    "timeouts.first_byte_s": ["0", "1979-05-27", "1" + "0" * 400],
    "timeouts.idle_s": ["0", "[1]"],
    "timeouts.client_body_s": ["0", "-0.5"],
    "timeouts.client_keepalive_s": ["0", "86401"],
    "timeouts.upstream_keepalive_s": ["0", "nan"],
    "timeouts.lame_duck_s": ["-1", "3601"],
    "timeouts.drain_s": ["-1", "86401"],
    "retry.attempts": ["-1", "17", "1.0"],
    "retry.budget": ["-0.1", "1.1"],
    "health.interval_s": ["0", "3601"],
    "health.timeout_s": ["0", "3601"],
    "health.unhealthy_after": ["0", "101"],
    "health.healthy_after": ["0", "101"],
    "health.connect_failures": ["0", "101"],
    "health.failed_attempts": ["0", "1001"],
    "health.silence_s": ["0", "86401"],
    "health.ejection_s": ["0", "86401"],
    "health.ejection_max_s": ["0", "4.9"],
    "auth.api_keys_file": ["1", '""'],
    "redis.url": ["1", '"http://a"'],
    "log.level": ['"trace"', "1"],
    "log.format": ['"xml"', "true"],
    "log.access": ["1", '"true"'],
    "log.decisions": ["true", '"yes"'],
    "tracing.otlp_endpoint": ["1", '""', '"127.0.0.1:4318"'],
    "tracing.headers_env": ["1", '"a=b"'],
    "tracing.sample_ratio": ["-0.1", "1.1", "true"],
    "tracing.service_name": ["1", '""', '"a b"'],
    "index.block_bytes": ["15", "65537", "128.0"],
    "index.memory_limit_bytes": ["1048575", "0"],
    "index.kv_memory_limit_bytes": ["1048575", "0"],
    "index.assumed_kv_tokens": ["0", "-1", "true"],
}
REJECTED_OF_A_BACKEND = {
    "url": [
        "5",
        '""',
        '"10.0.0.7:8000"',
        '"vllm"',
        '"ftp://a:1"',
        '"http://"',
        '"http://:8000"',
        '"http://a:0"',
        '"http://a:65536"',
        '"http://a:x"',
        '"http://a:1/v1"',
        '"http://a:1?x=1"',
        '"http://a:1?"',
        '"http://a:1#x"',
        '"http://u:p@a:1"',
        '"http://@a:1"',
        '"http://a b:1"',
        '"http://a\\tb:1"',
        '"http://[::1:1"',
        '"http://[fe80::1%25eth0]:1"',
        '"http://1.2.3:1"',
        '"http://münchen:1"',
    ],
    "name": ["5", '""', '"a b"', '"a/b"', '".."', '"a\\r\\nb"', f'"{"a" * 129}"'],
    "weight": ["0", "-1", "1001", "inf", "true", '"1"'],
    "models": ['"m"', "[]", "5"],
    "api_key_env": ["5", '"a b"', '""', '"1A"'],
    "tls_ca": ["1", '""'],
    "tls_verify": ["1", '"no"'],
    "kv_events": ["true", '"on"', '"http://a:1"', '"tcp://a"', '"tcp://a:0"', '"tcp://a:65536"', '"tcp://*:1"'],
}


@pytest.mark.parametrize(("path", "value"), [(path, value) for path, values in REJECTED.items() for value in values])
def test_a_wrong_value_is_a_fault_with_its_key_path(path, value):
    table, _, key = path.rpartition(".")
    fault = only_fault(f"[{table}]\n{key} = {value}")
    assert fault.key_path == path
    assert "not built yet" not in fault.expected


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in REJECTED_OF_A_BACKEND.items() for value in values]
)
def test_a_wrong_value_of_a_backend_is_a_fault_with_its_place(key, value):
    good = "" if key == "url" else 'url = "http://b:1"\n'
    fault = only_fault(f'[[backends]]\nurl = "http://a:1"\n[[backends]]\n{good}{key} = {value}')
    assert fault.key_path == f"backends[1].{key}"
    assert "not built yet" not in fault.expected


def test_every_key_has_values_that_are_rejected():
    tested = set(REJECTED) | {f"backends.{key}" for key in REJECTED_OF_A_BACKEND}
    assert tested == {path for path, _ in key_paths()}


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ('[routing.session]\nheaders = ["x", "a b"]', "routing.session.headers[1]", '"a b"'),
        ("[routing.session]\nheaders = [5]", "routing.session.headers[0]", "5"),
        ('[routing.session]\nbody_fields = ["x", ""]', "routing.session.body_fields[1]", '""'),
        (backend('models = ["m", 5]'), "backends[0].models[1]", "5"),
        (backend('models = ["a\\nb"]'), "backends[0].models[0]", '"a\\nb"'),
        ('[models.aliases]\n"gpt-4.1" = 5', 'models.aliases."gpt-4.1"', "5"),
        ('[models.aliases]\n"" = "m"', 'models.aliases.""', '""'),
        ('[models.tokenizers]\nm = ""', "models.tokenizers.m", '""'),
    ],
)
def test_a_wrong_element_is_pointed_at(text, path, value):
    fault = only_fault(text)
    assert (fault.key_path, fault.value) == (path, value)


@pytest.mark.parametrize(
    ("text", "path", "expected"),
    [
        ("server = 5", "server", "a table, [server]"),
        ("[routing]\nsession = []", "routing.session", "a table, [routing.session]"),
        ('[backends]\nurl = "http://a:1"', "backends", "an array of tables, [[backends]]"),
        ("backends = 1", "backends", "an array of tables, [[backends]]"),
        ("backends = [1]", "backends[0]", "a table, [backends[0]]"),
        ("[[server]]\nport = 1", "server", "a table, [server]"),
    ],
)
def test_a_wrong_shape_is_a_fault(text, path, expected):
    fault = faults_of(text)[0]
    assert (fault.key_path, fault.expected) == (path, expected)


def test_a_backend_without_url_is_a_fault():
    fault = only_fault('[[backends]]\nname = "a"')
    assert (fault.key_path, fault.value) == ("backends[0].url", "missing")


def test_more_backends_than_the_limit_are_refused_and_the_limit_is_not():
    def fleet(count: int) -> dict:
        return {"backends": [{"url": f"http://a:{1 + n}"} for n in range(count)]}

    assert len(parse(fleet(BACKENDS_LIMIT), environ={}).backends) == BACKENDS_LIMIT
    with pytest.raises(ConfigError, match=rf"^backends: {BACKENDS_LIMIT + 1} tables \(expected at most"):
        parse(fleet(BACKENDS_LIMIT + 1), environ={})


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ('url = "http://a:1"\nname = "x"', 'url = "http://b:1"\nname = "x"'),
        ('url = "http://a:80"', 'url = "http://A"'),
        ('url = "http://a:1"\nname = "b:1"', 'url = "http://b:1"'),
    ],
)
def test_two_backends_of_one_name_are_a_fault(first, second):
    fault = only_fault(f'[[backends]]\nurl = "http://c:1"\n[[backends]]\n{first}\n[[backends]]\n{second}')
    assert fault.key_path == "backends[2].name"
    assert fault.expected == "a name of its own; backends[1] has this one"


def test_ports_of_the_two_listeners_must_differ_on_one_address():
    assert only_fault("[server]\nport = 9090").key_path == "admin.port"
    assert only_fault('[server]\nhost = "0.0.0.0"\nport = 9090').key_path == "admin.port"
    assert config_of('[server]\nhost = "10.0.0.1"\nport = 9090').server.port == 9090
    assert config_of("[server]\nport = 0\n[admin]\nport = 0").admin.port == 0


def test_the_longest_ejection_is_at_least_the_first():
    fault = only_fault("[health]\nejection_s = 61")
    assert (fault.key_path, fault.value) == ("health.ejection_max_s", "60.0")
    assert config_of("[health]\nejection_s = 60").health.ejection_s == 60.0


# --- unknown keys ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "path", "meant"),
    [
        ("[server]\nprot = 1", "server.prot", 'did you mean "port"?'),
        ("[serverr]", "serverr", 'did you mean "server"?'),
        ("[routing.sesion]", "routing.sesion", 'did you mean "session"?'),
        (backend("wieght = 1"), "backends[0].wieght", 'did you mean "weight"?'),
        ("[server]\nconnect_s = 1", "server.connect_s", "did you mean timeouts.connect_s?"),
        ('strategy = "kvaware"', "strategy", "did you mean routing.strategy?"),
        ('[server]\n"a.b" = 1', 'server."a.b"', "tls_key"),
        ("[server]\nzzz = 1", "server.zzz", "one of host, port, workers, metrics, tls_cert, tls_key"),
    ],
)
def test_an_unknown_key_is_a_fault_that_knows_better(text, path, meant):
    fault = only_fault(text)
    assert (fault.key_path, fault.value) == (path, "unknown key")
    assert meant in fault.expected


def test_all_faults_are_named_at_once_each_on_one_line():
    with pytest.raises(ConfigError) as caught:
        config_of(
            'typo = 1\n[server]\nport = -1\nhost = "a\\nb"\n[log]\nlevel = 5\n[[backends]]\n[[backends]]\nurl = ""'
        )
    lines = str(caught.value).split("\n")
    paths = [line.partition(": ")[0] for line in lines]
    assert paths == ["typo", "server.host", "server.port", "backends[0].url", "backends[1].url", "log.level"]


def test_a_fault_reads_path_value_expectation():
    expected = "prefixaware, kvaware, session, roundrobin, leastload"
    fault = only_fault('[routing]\nstrategy = "foo"')
    assert str(fault) == f'routing.strategy: "foo" (expected one of {expected})'


# --- what the file only points to ------------------------------------------------------------------------------------


def keys_file(tmp_path, text: str) -> str:
    file = tmp_path / "keys"
    file.write_text(text)
    return f'[auth]\napi_keys_file = "{file}"'


def test_api_keys_are_read_plain_and_hashed_and_kept_as_digests(tmp_path):
    hashed = sha256(b"other").hexdigest()
    config = config_of(keys_file(tmp_path, f"# ours\n\nana:sk-1:2\r\n ben:sha256:{hashed.upper()}\n"))
    assert config.auth.keys == {sha256(b"sk-1:2").digest(): "ana", sha256(b"other").digest(): "ben"}
    assert "sk-1" not in repr(config)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("secret-key-alone", ", line 1"),
        ("a:ok\nb:has space", ", line 2"),
        ("a:", ", line 1"),
        (":key", ", line 1"),
        ("a:sha256:12", ", line 1"),
        ("a:sha256:" + "g" * 64, ", line 1"),
        ("a:same\nb:same", ", line 2"),
        ("# nothing\n", ": no key in it"),
        ("a:\u00e4", ", line 1"),
        ("a:" + "x" * 1024 * 1024, ": too large"),
    ],
)
def test_a_bad_line_of_keys_is_named_and_not_shown(tmp_path, text, where):
    fault = only_fault(keys_file(tmp_path, text))
    assert fault.key_path == "auth.api_keys_file"
    assert fault.value.endswith(where)
    assert not any(secret in str(fault) for secret in ("secret-key-alone", "has space", "same"))


def test_a_missing_file_of_keys_is_a_fault():
    assert "No such file" in only_fault('[auth]\napi_keys_file = "/nonexistent/keys"').value


def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "Not a regular file" in only_fault(f'[auth]\napi_keys_file = "{tmp_path}/pipe"').value
    both = f'tls_cert = "{tmp_path}/pipe"\ntls_key = "{tmp_path}/pipe"'
    assert only_fault(f"[server]\n{both}").key_path == "server.tls_cert"
    of_engine = f'[[backends]]\nurl = "https://a"\ntls_ca = "{tmp_path}/pipe"'
    assert only_fault(of_engine).key_path == "backends[0].tls_ca"


def test_an_alias_names_a_model_and_no_other_alias():
    aliases = '[models.aliases]\n"gpt-4o" = "llama"\n"gpt-4" = '
    assert config_of(aliases + '"llama"').models.aliases == {"gpt-4o": "llama", "gpt-4": "llama"}
    assert only_fault(aliases + '"gpt-4o"').key_path == "models.aliases.gpt-4"


def test_a_certificate_and_its_key_come_together():
    assert only_fault('[server]\ntls_cert = "/x"').key_path == "server.tls_key"
    assert only_fault('[server]\ntls_key = "/x"').key_path == "server.tls_cert"


def test_files_that_are_no_certificates_are_named(tmp_path):
    (tmp_path / "c").write_text("no certificate")
    both = f'tls_cert = "{tmp_path}/c"\ntls_key = "{tmp_path}/c"'
    assert only_fault(f"[server]\n{both}").key_path == "server.tls_cert"
    assert "No such file" in only_fault('[server]\ntls_cert = "/nonexistent/c"\ntls_key = "/nonexistent/c"').value
    of_engine = f'[[backends]]\nurl = "https://a"\ntls_ca = "{tmp_path}/c"'
    assert only_fault(of_engine).key_path == "backends[0].tls_ca"


def test_a_ca_is_for_https_engines_whose_certificates_are_verified(tmp_path):
    ca = f'tls_ca = "{make_certificates(tmp_path).ca}"'
    assert config_of(f'[[backends]]\nurl = "https://a"\n{ca}').backends[0].url == "https://a:443"
    assert only_fault(f'[[backends]]\nurl = "http://a"\n{ca}').key_path == "backends[0].tls_ca"
    unverified = f'[[backends]]\nurl = "https://a"\n{ca}\ntls_verify = false'
    assert only_fault(unverified).expected == "tls_verify = true with it"


@pytest.mark.parametrize(
    ("text", "variable"),
    [
        ('[admin]\ntoken_env = "V"', "admin.token_env"),
        ('[tracing]\nheaders_env = "V"', "tracing.headers_env"),
        ('[[backends]]\nurl = "http://a:1"\napi_key_env = "V"', "backends[0].api_key_env"),
    ],
)
def test_a_secret_comes_from_its_variable_and_is_never_shown(text, variable):
    config = parse(text.encode(), environ={"V": " s3cret\n"})
    assert "s3cret" in (config.admin.token, config.tracing.headers, *(b.api_key for b in config.backends))
    assert "s3cret" not in repr(config)
    assert only_fault(text).key_path == variable


# --- tokenizers ------------------------------------------------------------------------------------------------------

WITHOUT_THE_EXTRA = {
    "routing.kvaware.tokenization": 'tokenization = "local"',
    "routing.kvaware.tokenizer": 'tokenizer = "FOLDER"',
    "models.tokenizers": '[models.tokenizers]\nm = "FOLDER"',
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def test_a_models_folder_is_looked_for_at_the_start(folder):
    text = f'[models.tokenizers]\n"org/a" = "{folder}"\n"org/b" = "{folder}/b"'
    fault = only_fault(text)
    assert fault.key_path == 'models.tokenizers."org/b"'
    assert fault.value == f'"{folder}/b": No such file or directory'
    assert fault.expected == "a folder with a tokenizer.json"


@pytest.mark.parametrize(("path", "text"), WITHOUT_THE_EXTRA.items())
def test_local_tokenizing_needs_its_extra_where_it_would_be_used(path, text, folder, monkeypatch):
    text = f"[routing.kvaware]\n{text}".replace("FOLDER", str(folder))
    used = f'[routing]\nstrategy = "kvaware"\n{text}'
    config_of(used)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    fault = only_fault(used)
    assert (fault.key_path, "kvgate[tokenizers]" in fault.expected) == (path, True)
    config_of(text)  # another strategy counts no tokens
    with pytest.raises(ConfigError):
        with_flags(config_of(text), strategy="kvaware")


def test_engines_may_be_asked_without_the_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for tokenization in ("auto", "engine", "off"):
        config_of(f'[routing]\nstrategy = "kvaware"\n[routing.kvaware]\ntokenization = "{tokenization}"')


# --- not built yet ---------------------------------------------------------------------------------------------------

NOT_YET = {
    "server.workers": "[server]\nworkers = 2",
    "redis.url": '[redis]\nurl = "redis://a:1/0"',
}
DEFAULTS_GIVEN = """
[server]
workers = 1
[routing.kvaware]
tokenization = "auto"
[routing.line]
hold = "auto"
[kv_cache]
l2_format = "lmcache"
[models.aliases]
[models.tokenizers]
[auth]
[redis]
[[backends]]
url = "http://a:1"
kv_events = "auto"
"""


@pytest.mark.parametrize(("path", "text"), NOT_YET.items())
def test_a_key_whose_feature_is_not_built_is_refused_away_from_its_default(path, text):
    fault = only_fault(text)
    assert fault.key_path == path
    assert fault.expected.endswith("not built yet; leave it at its default")


def test_keys_of_features_not_built_are_accepted_at_their_defaults():
    assert len(config_of(DEFAULTS_GIVEN).backends) == 1


def test_every_entry_of_the_table_of_what_is_not_built_is_tested():
    assert {path.replace("[0]", "") for path in NOT_YET} == set(NOT_BUILT)


# --- secrets ---------------------------------------------------------------------------------------------------------


def test_a_secret_is_read_from_its_variable_once_and_stays_out_of_repr():
    environ = {"ENGINE_KEY": "s3cret\n"}
    config = config_of(backend('api_key_env = "ENGINE_KEY"'), environ)
    environ.clear()
    assert config.backends[0].api_key == "s3cret"
    assert "s3cret" not in repr(config)


def test_the_environment_of_the_process_is_the_default(monkeypatch):
    monkeypatch.setenv("KVGATE_TEST_KEY", "abc")
    assert parse(backend('api_key_env = "KVGATE_TEST_KEY"').encode()).backends[0].api_key == "abc"


def test_a_variable_that_is_not_set_is_a_fault_with_its_name():
    fault = only_fault(backend('api_key_env = "ENGINE_KEY"'))
    assert (fault.key_path, fault.value) == ("backends[0].api_key_env", '"ENGINE_KEY"')
    assert "that is set" in fault.expected


@pytest.mark.parametrize("secret", ["", " \n", "a b", "a\r\nx-evil: 1", "ä", "k" * 4097])
def test_a_secret_that_cannot_stand_in_a_header_is_a_fault_that_does_not_show_it(secret):
    fault = only_fault(backend('api_key_env = "ENGINE_KEY"'), {"ENGINE_KEY": secret})
    assert fault.value == '"ENGINE_KEY"'
    assert not secret.strip() or secret.strip() not in fault.expected


@pytest.mark.parametrize(
    "text",
    [
        backend('api_key = "s3cret"'),  # a key that does not exist
        backend('api_key_env = "sk-s3cret"'),  # the key itself in place of the variable's name
        backend('api_key_env = "hf_s3cret"'),
        '[admin]\ntoken_env = "s3cret"',
        '[[backends]]\nurl = "http://user:s3cret@a:1"',
        '[[backends]]\nurl = "user:s3cret@a:1"',
        '[[backends]]\nurl = "http://a:1/v1?key=s3cret"',
        '[redis]\nurl = "redis://:s3cret@a:1/0"',
        '[redis]\nurl = "redis://:s3c/s3cret@a:1/0"',
        '[kv_cache]\nl2 = "http://:s3cret@a:1/0"',
        '[kv_cache]\nl2 = "redis://:s3cret@a:1/0"',
    ],
)
def test_no_fault_shows_what_may_be_a_secret(text):
    assert "s3cret" not in "\n".join(map(str, faults_of(text)))


def test_a_long_value_is_cut_and_a_control_character_escaped():
    fault = only_fault(f'[log]\nlevel = "{"x" * 10_000}"')
    assert len(fault.value) < 120
    assert "\x1b" not in str(only_fault('[log]\nlevel = "\\u001b[31m"'))


# --- the shared store ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["redis://a", "redis://a:1/", "rediss://me@[::1]:6380/15", "redis://10.0.0.9:6379/0"])
def test_a_store_is_a_url_and_its_password_a_variable(url):
    config = config_of(f'[kv_cache]\nl2 = "{url}"\nl2_password_env = "PW"', {"PW": "s3cret\n"})
    assert (config.kv_cache.l2, config.kv_cache.l2_password) == (url, "s3cret")
    assert "s3cret" not in repr(config)


@pytest.mark.parametrize(
    ("lines", "path"),
    [
        ('l2_password_env = "PW"', "kv_cache.l2_password_env"),
        ('l2 = "redis://a:1"\nl2_password_env = "NOT_SET"', "kv_cache.l2_password_env"),
        ('l2 = "rediss://a:1"\nl2_tls_ca = "/nowhere/ca.crt"', "kv_cache.l2_tls_ca"),
    ],
)
def test_what_a_store_lacks_or_cannot_use_is_named(lines, path):
    assert only_fault(f"[kv_cache]\n{lines}", {"PW": "s3cret"}).key_path == path


def test_a_ca_needs_a_store_that_speaks_tls(tmp_path):
    made = make_certificates(tmp_path)
    fault = only_fault(f'[kv_cache]\nl2 = "redis://a:1"\nl2_tls_ca = "{made.ca}"')
    assert (fault.key_path, fault.expected) == ("kv_cache.l2_tls_ca", "a rediss:// url in kv_cache.l2 with it")


# --- TOML and files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (b"[server]\nport 80\n", "line 2, column 6"),
        (b"[server]\nport = 1\nport = 2\n", "line 3, column 9"),
        (b"[server]\nport = ", "line 2, column 8"),
        (b"[server\n", "line 1, column 8"),
        (b'[server]\nhost = "\xff"\n', "line 2, column 9"),
    ],
)
def test_broken_toml_is_one_fault_with_line_and_column(text, where):
    with pytest.raises(ConfigError) as caught:
        parse(text, name="kvgate.toml")
    (fault,) = caught.value.faults
    assert fault.key_path == "kvgate.toml"
    assert where in str(fault)
    assert "\n" not in str(fault)


def test_absurd_nesting_is_a_fault():
    assert "nested too deep" in str(faults_of(b"a=" + b"[" * 100_000)[0])


def test_a_file_is_loaded_and_its_faults_carry_key_paths(tmp_path):
    file = tmp_path / "kvgate.toml"
    file.write_text("[server]\nport = 1\n")
    assert load(file, environ={}).server.port == 1
    file.write_text("[server]\nport = -1\n")
    with pytest.raises(ConfigError, match=r"^server\.port: -1 "):
        load(str(file), environ={})


def test_a_file_that_cannot_be_read_is_a_fault(tmp_path):
    for path in (tmp_path / "absent.toml", tmp_path):
        with pytest.raises(ConfigError) as caught:
            load(path)
        assert caught.value.faults[0].key_path == str(path)


def test_a_file_above_the_limit_is_a_fault_and_one_at_the_limit_is_not(tmp_path):
    file = tmp_path / "kvgate.toml"
    file.write_bytes(b"#" * FILE_LIMIT_BYTES)
    assert load(file, environ={}) == Config()
    file.write_bytes(b"#" * (FILE_LIMIT_BYTES + 1))
    with pytest.raises(ConfigError, match="too large"):
        load(file)


# --- flags -----------------------------------------------------------------------------------------------------------


def test_flags_win_over_the_file_and_the_rest_stays():
    file = config_of(backend('name = "x"') + '[server]\nport = 1\nhost = "::"\n[routing.session]\ncookie = "c"')
    config = with_flags(
        file, backends=["http://a:1", "http://[::1]:2/"], strategy="session", host="0.0.0.0", port=0, workers=1
    )
    assert [(backend.name, backend.url) for backend in config.backends] == [
        ("a:1", "http://a:1"),
        ("[::1]:2", "http://[::1]:2"),
    ]
    assert (config.server.host, config.server.port) == ("0.0.0.0", 0)
    assert config.routing.strategy == "session"
    assert config.routing.session.cookie == "c"


def test_without_flags_the_configuration_is_the_same():
    config = config_of(backend('name = "x"'))
    assert with_flags(config) == config


@pytest.mark.parametrize(
    ("flags", "path"),
    [
        ({"backends": ["a:1"]}, "--backend"),
        ({"backends": ["http://a:1", "http://a:1/"]}, "--backend"),
        ({"strategy": "foo"}, "--strategy"),
        ({"host": "a b"}, "--host"),
        ({"port": 65536}, "--port"),
        ({"port": 9090}, "admin.port"),
        ({"workers": 0}, "--workers"),
        ({"workers": 2}, "--workers"),
    ],
)
def test_a_wrong_flag_is_a_fault_with_the_flag(flags, path):
    with pytest.raises(ConfigError) as caught:
        with_flags(Config(), **flags)
    assert [fault.key_path for fault in caught.value.faults] == [path]


# --- objects ---------------------------------------------------------------------------------------------------------


def test_the_configuration_cannot_be_changed_and_takes_no_new_attributes():
    config = Config()
    with pytest.raises(AttributeError):
        config.server = None
    with pytest.raises((AttributeError, TypeError)):
        config.server.extra = 1


def test_defaults_pass_their_own_rules():
    document: dict = {}
    for path, default in key_paths():
        if default is None or path.startswith("backends."):
            continue
        place = document
        *tables, key = path.split(".")
        for table in tables:
            place = place.setdefault(table, {})
        place[key] = list(default) if isinstance(default, tuple) else default
        assert not isinstance(default, float) or math.isfinite(default)
    assert parse(json.loads(json.dumps(document)), environ={}) == Config()
