"""Recording rules, alerts and dashboards, with Prometheus' own tools and a real Prometheus that scrapes a real cluster."""
import glob
import http.client
import importlib.util
import json
import os
import re
import shutil
import subprocess
import urllib.parse

import pytest

from conftest import ROOT, wait_for
from test_metrics import c, exposition, series, tables  # noqa: F401

RULES = os.path.join(ROOT, "deploy", "prometheus")
NAME = re.compile(r"\b(?:baton_|vllm:|baton:)[a-z0-9_:]+")

# For each alert: series that make it fire within half an hour, and the same series when all is well.
GROWS, STANDS, ONE, ZERO = "0+10x30", "7x30", "1x30", "0x30"
ERRORS = 'baton_plan_error_ratio_bucket{of="ttft",le="%s"}'
ALERTS = {
    "BatonDaemonDown": ('up{job="baton-decode"}', ZERO, ONE),
    "BatonNoWorker": ('baton_sessions_up{kind="worker"}', ZERO, ONE),
    "BatonRequestsFailed": ('baton_requests_rejected_total{reason="failed"}', GROWS, STANDS),
    "BatonQueueStands": ("vllm:num_requests_waiting", "3x30", ZERO),
    "BatonReplans": ("baton_requests_replanned_total", GROWS, "0 1x29"),
    "BatonRequestStuck": ("baton_requests_stuck_total", GROWS, STANDS),
    "BatonConnectionsRefused": ("baton_http_connections_unheard_total", GROWS, STANDS),
    "BatonIndexFull": ("baton_index_refused_total", GROWS, STANDS),
    "BatonMemberMisnamed": ("baton_members_misnamed", ONE, ZERO),
    "BatonMasksLate": ("baton_worker_masks_late_total", "0+100x30", "0+10x30"),
    "BatonWorkerKilled": ("baton_kvstore_workers_killed_total", GROWS, STANDS),
    "BatonQuarantine": ('baton_pool_slots{state="quarantine"}', ONE, ZERO),
    "BatonGrantsFail": ("baton_kvstore_grants_failed_total", GROWS, "0+1x30"),
    "BatonKvDamaged": ('baton_ssd_errors_total{what="crc"}', GROWS, STANDS),
    "BatonSsdDown": ("baton_ssd_up", ZERO, ONE),
    "BatonSsdSlow": ("baton_kvstore_ssd_late_total", GROWS, "0+1x30"),
    "BatonFetchesFail": ('baton_kvstore_fetches_total{result="failed"}', GROWS, "0+1x30"),
    "BatonCardDown": ('baton_kv_card_up{interface="a"}', ZERO, ONE),
    "BatonPeerSessionsLost": ("baton_kv_peer_sessions_lost_total", GROWS, "0 1 2 2x27"),
    "BatonWireProcessLost": ("baton_kv_wire_process_losses_total", GROWS, STANDS),
    "BatonTracesLost": ('baton_trace_spans_total{result="queue_full"}', GROWS, STANDS),
    "BatonCertificateEnds": ("baton_tls_certificate_not_after_seconds", "600000x30", "6000000x30"),
    # Of several series: lists.
    "BatonRequestsRefused": (['baton_requests_rejected_total{reason="no_room"}', "vllm:request_success_total"],
                             [GROWS, "0+100x30"], [GROWS, "0+1000x30"]),
    "BatonSlowFirstToken": ([f'vllm:time_to_first_token_seconds_bucket{{le="{le}"}}' for le in ("5", "10", "+Inf")],
                            [ZERO, GROWS, GROWS], [GROWS, GROWS, GROWS]),
    "BatonSlowTokens": ([f'vllm:inter_token_latency_seconds_bucket{{le="{le}"}}' for le in ("0.5", "1", "+Inf")],
                        [ZERO, GROWS, GROWS], [GROWS, GROWS, GROWS]),
    "BatonPredictionsOff": ([ERRORS % le for le in ("1", "2", "+Inf")], [ZERO, GROWS, GROWS], [GROWS, GROWS, GROWS]),
    "BatonSlowLoop": ([f'baton_loop_tick_seconds_bucket{{clock="wall",le="{le}"}}' for le in ("0.05", "0.1", "+Inf")],
                      [ZERO, GROWS, GROWS], [GROWS, GROWS, GROWS]),
    "BatonPagesShort": (["vllm:kv_cache_usage_perc", "vllm:num_preemptions_total"], ["0.95x30", GROWS], ["0.95x30", STANDS]),
}
OF_SPEED = {"BatonSlowFirstToken", "BatonSlowTokens", "BatonSlowLoop", "BatonPredictionsOff"}


def tool(name):
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"no {name} here (Debian's package prometheus)")
    return path


def rules(kind):
    """[(name, expression)] of the recording rules or the alerts, without a YAML library."""
    out = []
    for path in sorted(glob.glob(os.path.join(RULES, "*s.yml"))):
        with open(path) as f:
            text = re.sub(r"expr: >\n((?: {10,}.*\n)+)", lambda m: "expr: " + " ".join(m[1].split()) + "\n", f.read())
        out += re.findall(rf"- {kind}: (\S+)\n +expr: (.*)", text)
    return out


def panels():
    """[(dashboard: title, expression)]"""
    out = []
    for path in glob.glob(os.path.join(ROOT, "deploy", "grafana", "*.json")):
        with open(path) as f:
            d = json.load(f)
        out += [(f"{d['title']}: {p['title']}", t["expr"]) for p in d["panels"] for t in p.get("targets", [])]
    assert len(out) > 60
    return out


def test_configuration_and_rules_are_sound(tmp_path):
    for path in glob.glob(os.path.join(RULES, "*.yml")):  # it names files that deploy/compose/setup makes
        with open(path) as f:
            (tmp_path / os.path.basename(path)).write_text(f.read().replace("/monitoring/", f"{tmp_path}/"))
    for name in "ca.crt", "key":
        (tmp_path / name).write_text("")
    p = subprocess.run([tool("promtool"), "check", "config", str(tmp_path / "prometheus.yml")], stdout=subprocess.PIPE,
                       stderr=subprocess.STDOUT, timeout=300)
    assert p.returncode == 0 and p.stdout.count(b"rules found") == 2, p.stdout.decode()


def test_every_alert_fires_and_only_then(tmp_path):
    """One that never fires is found here, as is one that fires when all is well."""
    assert set(ALERTS) == {name for name, _ in rules("alert")}
    tests, well = [], {}

    def case(name, series_of, fires):
        firing = f'count by (alertname) (ALERTS{{alertstate="firing",alertname=~"{fires or ".*"}"}})'
        tests.append({"name": name, "interval": "1m", "input_series": [{"series": s, "values": v} for s, v in series_of.items()],
                      "promql_expr_test": [{"expr": firing, "eval_time": "29m",
                                            "exp_samples": [{"labels": f'{{alertname="{fires}"}}', "value": 1}] if fires else []}]})

    for name, (what, bad, good) in ALERTS.items():
        names, of_bad, of_good = (x if isinstance(what, list) else [x] for x in (what, bad, good))
        case(name, dict(zip(names, of_bad, strict=True)), name)
        assert not well.keys() & set(names)
        well.update(zip(names, of_good, strict=True))
    case("all is well", well, None)
    file = tmp_path / "t.json"
    file.write_text(json.dumps({"rule_files": [os.path.join(RULES, f) for f in ("rules.yml", "alerts.yml")],
                                "evaluation_interval": "1m", "tests": tests,
                                "group_eval_order": ["baton-requests", "baton-plans", "baton-pool", "baton"]}))
    p = subprocess.run([tool("promtool"), "test", "rules", str(file)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300)
    assert p.returncode == 0, p.stdout.decode()


def test_alerts_lead_to_their_sections():
    with open(os.path.join(ROOT, "docs", "TROUBLESHOOTING.md")) as f:
        sections = dict(re.findall(r"^### (Baton\w+)\n\n((?:.+\n)+)", f.read(), re.M))
    with open(os.path.join(RULES, "alerts.yml")) as f:
        urls = re.findall(r"runbook_url: (\S+)", f.read())
    names = [name for name, _ in rules("alert")]
    assert urls == ["docs/TROUBLESHOOTING.md#" + n.lower() for n in names]
    assert set(sections) == set(names)
    for name, text in sections.items():
        assert re.findall(r"^- \*\*(\w+)\*\*: .", text, re.M) == ["Symptom", "Cause", "Command"], name


def test_dashboards_are_what_the_tool_writes():
    folder = os.path.join(ROOT, "deploy", "grafana")
    spec = importlib.util.spec_from_file_location("dashboards", os.path.join(folder, "dashboards.py"))
    m = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(m)
    for name, text in m.FILES.items():
        with open(os.path.join(folder, name)) as f:
            assert f.read() == text, f"{name}: run make docs"
        places = [tuple(p["gridPos"].values()) for p in json.loads(text)["panels"]]
        assert len(set(places)) == len(places)


def test_metrics_of_rules_and_panels_exist(c):  # noqa: F811
    c.complete("ROMEO:\n", 4)
    served = {name for d in c.status() if d["daemon"] != "etcd" for name in series(exposition(d["http"]))}
    elsewhere = {n for t in tables().values() for n in t if n.startswith("baton_kv_card_")}  # no card over loopback
    known = served | elsewhere | {name for name, _ in rules("record")}
    for where, expr in rules("record") + rules("alert") + panels():
        for name in NAME.findall(expr):
            assert name in known or re.sub(r"_(bucket|sum|count)$", "", name) in known, (where, name)


class Prometheus:
    def __init__(self, folder, targets):
        jobs = [{"job_name": "baton-" + kind, "static_configs": [{"targets": at}]} for kind, at in targets.items()]
        conf = {"global": {"scrape_interval": "1s", "evaluation_interval": "500ms"}, "scrape_configs": jobs,
                "rule_files": [os.path.join(RULES, f) for f in ("rules.yml", "alerts.yml")]}
        (folder / "p.yml").write_text(json.dumps(conf))
        with open(folder / "log", "w") as log:
            self.process = subprocess.Popen([tool("prometheus"), f"--config.file={folder}/p.yml", f"--storage.tsdb.path={folder}/data",
                                             "--web.listen-address=127.0.0.1:0"], stdout=log, stderr=log)
        try:
            listens = wait_for(lambda: re.search(r"Listening on.*:(\d+)$", (folder / "log").read_text(), re.M), 60, "it listens")
        except AssertionError:
            self.stop()
            raise
        self.port = int(listens[1])

    def get(self, path):
        conn = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            conn.request("GET", "/api/v1/" + path)
            body = json.loads(conn.getresponse().read())
        except (OSError, ValueError):  # not there yet
            return None
        finally:
            conn.close()
        assert body["status"] == "success", (path, body)
        return body["data"]

    def query(self, expr):
        data = self.get("query?" + urllib.parse.urlencode({"query": expr}))
        return data["result"] if data else []

    def stop(self):
        self.process.terminate()
        self.process.wait(timeout=30)


def test_a_real_prometheus(c, tmp_path):  # noqa: F811
    targets = {}
    for d in c.status():
        if d["daemon"] != "etcd":
            targets.setdefault(d["daemon"], []).append(d["http"])
    targets["decode"].append("127.0.0.1:1")  # a daemon that is not there
    p = Prometheus(tmp_path, targets)
    try:
        wait_for(lambda: len(p.query('up{job=~"baton-.*"} == 1')) == 5, 60, "all daemons are scraped")
        c.complete("ROMEO:\n", 8)
        rate = "baton:tokens:rate5m"
        wait_for(lambda: any(float(s["value"][1]) > 0 for s in p.query(rate)), 60, "a recording rule has a value")
        found = wait_for(lambda: (lambda f: None if any(r["health"] == "unknown" for r in f) else f)(
            [r for g in p.get("rules")["groups"] for r in g["rules"]]), 60, "each rule is evaluated")
        assert len(found) == len(rules("record") + rules("alert"))
        assert all(r["health"] == "ok" for r in found), [r for r in found if r["health"] != "ok"]
        # Only the daemon that is not there alarms; but a busy machine is slow, and may be late for one scrape.
        wait_for(lambda: {(a["labels"]["alertname"], a["labels"].get("instance")) for a in p.get("alerts")["alerts"]
                          if a["labels"]["alertname"] not in OF_SPEED} == {("BatonDaemonDown", "127.0.0.1:1")}, 60, "that alert alone")
        for where, expr in panels():
            p.query(expr.replace("$__rate_interval", "1m").replace("$model", ".*"))  # fails if it is no expression
    finally:
        p.stop()
