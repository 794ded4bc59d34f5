#!/usr/bin/python3
"""Writes the Grafana dashboards beside it: one of vLLM's series, one of the cluster. `make docs` runs it; a test checks that
the files are what it writes. A panel is (title, unit, {legend: expression}); M is the model that the viewer has chosen."""
import json
import os

RATE = "[$__rate_interval]"
M = '{model_name=~"$model"}'


def quantiles(metric, by="", labels=M):
    series = f"sum by ({by + ', ' if by else ''}le) (rate({metric}_bucket{labels}{RATE}))"
    return {f"p{round(100 * q)}{' {{' + by + '}}' if by else ''}": f"histogram_quantile({q}, {series})" for q in (0.5, 0.95, 0.99)}


def mean(metric):
    return f"sum(rate({metric}_sum{M}{RATE})) / sum(rate({metric}_count{M}{RATE}))"


def rate(metric, by="", labels=""):
    return f"sum by ({by}) (rate({metric}{labels}{RATE}))" if by else f"sum(rate({metric}{labels}{RATE}))"


VLLM = [
    ("Requests", [
        ("End to end", "s", quantiles("vllm:e2e_request_latency_seconds")),
        ("Time to first token", "s", quantiles("vllm:time_to_first_token_seconds")),
        ("Time per output token", "s", quantiles("vllm:time_per_output_token_seconds")),
        ("Where the time goes", "s", {p: mean(f"vllm:request_{p}_time_seconds") for p in ("queue", "prefill", "decode")}),
        ("Running and waiting", "short", {p: f"sum(vllm:num_requests_{p}{M})" for p in ("running", "waiting")}),
        ("Ends", "reqps", {"{{finished_reason}}": rate("vllm:request_success_total", "finished_reason", M)}),
    ]),
    ("Tokens", [
        ("Tokens a second", "short", {"prompt": rate("vllm:prompt_tokens_total", "", M),
                                      "cached": rate("vllm:prompt_tokens_cached_total", "", M),
                                      "generated": rate("vllm:generation_tokens_total", "", M)}),
        ("Length of prompts", "short", quantiles("vllm:request_prompt_tokens")),
        ("Length of answers", "short", quantiles("vllm:request_generation_tokens")),
        ("Asked for", "short", {"max_tokens": mean("vllm:request_params_max_tokens"), "n": mean("vllm:request_params_n"),
                                "longest choice": mean("vllm:request_max_num_generation_tokens")}),
    ]),
    ("Engines", [
        ("KV pages in use", "percentunit", {"{{instance}}": f"vllm:gpu_cache_usage_perc{M}"}),
        ("Prefix cache hits", "percentunit", {"hits": f"{rate('vllm:prefix_cache_hits_total', '', M)} / "
                                                      f"{rate('vllm:prefix_cache_queries_total', '', M)}"}),
        ("Preemptions", "ops", {"{{instance}}": rate("vllm:num_preemptions_total", "instance", M)}),
        ("Tokens of a step", "short", quantiles("vllm:iteration_tokens_total")),
        ("Drafts", "short", {w: rate(f"vllm:spec_decode_num_{w.replace(' ', '_')}_total", "", M)
                             for w in ("draft tokens", "accepted tokens")}),
        ("Drafts accepted, by place", "percentunit",
         {"{{position}}": f"{rate('vllm:spec_decode_num_accepted_tokens_per_pos_total', 'position', M)} / ignoring(position) "
                          f"group_left {rate('vllm:spec_decode_num_drafts_total', '', M)}"}),
    ]),
]

CLUSTER = [
    ("Plans", [
        ("Plans by reason", "ops", {"{{kind}}: {{reason}}": rate("baton_plan_total", "kind, reason")}),
        ("Error of predictions: time to first token", "percentunit",
         quantiles("baton_plan_error_ratio", "", '{of="ttft"}')),
        ("Error of predictions: time between tokens", "percentunit",
         quantiles("baton_plan_error_ratio", "", '{of="tbt"}')),
        ("Error of predicted steps, median", "percentunit",
         {"{{instance}} {{step}}": f"histogram_quantile(0.5, sum by (instance, step, le) (rate(baton_worker_step_error_ratio_bucket{RATE})))"}),
        ("Planned again", "ops", {"after failures": rate("baton_requests_replanned_total"),
                                  "a daemon leaves": rate("baton_requests_moved_total"),
                                  "stuck": rate("baton_requests_stuck_total")}),
        ("Refused or failed", "reqps", {"{{reason}}": "baton:requests_rejected:rate5m"}),
        ("Sessions of conductors", "short", {"{{instance}} {{kind}}": "baton_sessions_up"}),
        ("Fetches of plans", "short", {"plans/s": rate("baton_plan_fetches_total"), "tokens/s": rate("baton_plan_fetch_tokens_total")}),
    ]),
    ("Flows between nodes", [
        ("Time of a hand-off", "s", quantiles("baton_kv_transfer_seconds", "", "")),
        ("KV between nodes", "Bps", {"sent {{instance}}": rate("baton_kv_sent_bytes_total", "instance"),
                                     "received {{instance}}": rate("baton_kv_received_bytes_total", "instance")}),
        ("Network cards", "Bps", {"{{instance}} {{interface}} {{dir}}": rate("baton_kv_card_bytes_total", "instance, interface, dir")}),
        ("Faults", "ops", {"flows failed": rate("baton_kv_flows_failed_total"), "wrong checksums": rate("baton_kv_crc_errors_total"),
                           "sessions lost": rate("baton_kv_peer_sessions_lost_total"),
                           "grants failed": rate("baton_kvstore_grants_failed_total"),
                           "sent again": rate("baton_kv_resent_segments_total")}),
        ("Prefixes fetched from other nodes", "Bps", {"{{tier}}": rate("baton_kvstore_fetched_bytes_total", "tier")}),
        ("Time of a fetch; wait for a prefix", "s",
         {"fetch p95": f"histogram_quantile(0.95, sum by (le) (rate(baton_kvstore_fetch_seconds_bucket{RATE})))",
          "wait p95": f"histogram_quantile(0.95, sum by (le) (rate(baton_kvstore_gather_seconds_bucket{RATE})))"}),
    ]),
    ("Pool", [
        ("Slots by state", "short", {"{{state}}": "sum by (state) (baton_pool_slots)"}),
        ("Blocks of the prompt: found or not", "ops", {"{{result}}": rate("baton_kvstore_prefix_blocks_total", "result")}),
        ("Sealed and evicted", "ops", {"sealed": rate("baton_kvstore_blocks_sealed_total"),
                                       "evicted": rate("baton_kvstore_blocks_evicted_total")}),
        ("SSD: blocks and slots", "short", {"blocks {{instance}}": "baton_ssd_blocks", "slots {{instance}}": "baton_ssd_slots"}),
        ("SSD: bytes", "Bps", {"read": rate("baton_ssd_read_bytes_total"), "written": rate("baton_ssd_written_bytes_total")}),
        ("SSD: loads", "ops", {"{{result}}": rate("baton_kvstore_ssd_loads_total", "result"), "late": rate("baton_kvstore_ssd_late_total")}),
    ]),
    ("Workers", [
        ("Rows", "short", {"running {{instance}}": "baton_worker_requests_running", "waiting {{instance}}": "baton_worker_requests_waiting"}),
        ("Steps a second", "ops", {"{{instance}}": rate("baton_worker_steps_total", "instance")}),
        ("Drafts accepted", "percentunit", {"{{model_name}}": "baton:drafts_accepted:ratio5m"}),
        ("Wait for masks", "s", {"{{instance}}": f"sum by (instance) (rate(baton_worker_mask_wait_seconds_sum{RATE})) / "
                                                 f"sum by (instance) (rate(baton_worker_mask_wait_seconds_count{RATE}))"}),
        ("Preempted rows' tokens", "short", {"{{kv}}": rate("baton_worker_resumed_tokens_total", "kv")}),
        ("Spans of traces", "ops", {"{{result}}": rate("baton_trace_spans_total", "result")}),
        ("Turns of the conductors' loops", "s", quantiles("baton_loop_tick_seconds", "clock", "")),
    ]),
]

SOURCE = {"type": "prometheus", "uid": "${source}"}


def variable(name, kind, query, **more):
    return dict({"name": name, "type": kind, "query": query, "label": name, "refresh": 2, "includeAll": False, "multi": False}, **more)


def panels(rows):
    y, out = 0, []
    for title, members in rows:
        out.append({"id": len(out) + 1, "type": "row", "title": title, "collapsed": False, "panels": [],
                    "gridPos": {"h": 1, "w": 24, "x": 0, "y": y}})
        for i, (name, unit, targets) in enumerate(members):
            out.append({
                "id": len(out) + 1, "type": "timeseries", "title": name, "datasource": SOURCE,
                "gridPos": {"h": 8, "w": 8, "x": 8 * (i % 3), "y": y + 1 + 8 * (i // 3)},
                "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
                "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
                "targets": [{"refId": chr(ord("A") + k), "datasource": SOURCE, "expr": expr, "legendFormat": legend}
                            for k, (legend, expr) in enumerate(targets.items())]})
        y += 1 + 8 * ((len(members) + 2) // 3)
    return out


def dashboard(uid, title, rows):
    model = variable("model", "query", "label_values(vllm:num_requests_running, model_name)", datasource=SOURCE, includeAll=True,
                     multi=True, current={"text": "All", "value": "$__all"})
    variables = [variable("source", "datasource", "prometheus")] + ([model] if any("$model" in e for _, ms in rows for _, _, t in ms
                                                                                    for e in t.values()) else [])
    return {"uid": uid, "title": title, "tags": ["baton"], "schemaVersion": 39, "version": 1, "editable": True, "refresh": "10s",
            "time": {"from": "now-30m", "to": "now"}, "templating": {"list": variables}, "panels": panels(rows)}


def text(d):
    """JSON with a line for each panel: a change of one shows as one."""
    lines = ",\n".join("    " + json.dumps(p) for p in d["panels"])
    head = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in d.items() if k != "panels")
    return "{\n" + head + ',\n  "panels": [\n' + lines + "\n  ]\n}\n"


FILES = {"vllm.json": text(dashboard("baton-vllm", "Baton: vLLM's series", VLLM)),
         "cluster.json": text(dashboard("baton-cluster", "Baton: the cluster", CLUSTER))}

if __name__ == "__main__":
    for name, content in FILES.items():
        with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), name), "w") as f:
            f.write(content)
