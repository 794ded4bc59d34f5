/* The configuration keys that every daemon has. docs/CONFIG.md is printed from this table. */
#include "common/conf/conf.h"

#define ROW(member) offsetof(struct bt_conf_common, member)

const struct bt_conf_row bt_conf_common_rows[] = {
    {.key = "cluster.name",
     .type = BT_CONF_STR,
     .offset = ROW(cluster_name),
     .def = "baton",
     .doc = "Name of the cluster and prefix of its keys in etcd: 1 to 128 letters, digits and "
            "the signs . _ -.",
     .when = "when two clusters share one etcd."},
    {.key = "node.id",
     .type = BT_CONF_STR,
     .offset = ROW(node_id),
     .required = true,
     .doc = "Name of this node. Daemons with the same node.id share one kvstore and its slab.",
     .when = "always set it, for example to the host name."},
    {.key = "cluster.tls.ca",
     .type = BT_CONF_STR,
     .offset = ROW(cluster_tls_ca),
     .doc = "File (PEM) of the cluster's CA. With this key, .cert and .key on all daemons, "
            "gRPC is encrypted and both ends show a certificate. A replaced file is read "
            "within seconds.",
     .when = "when others can reach the network between the nodes."},
    {.key = "cluster.tls.cert",
     .type = BT_CONF_STR,
     .offset = ROW(cluster_tls_cert),
     .doc = "File (PEM) of this daemon's certificate, then intermediate ones. Its "
            "subjectAltName has one or more URI:baton://CLUSTER/ROLE/NODE. ROLE is conductor, "
            "prefill, decode or kvstore.",
     .when = "together with cluster.tls.ca."},
    {.key = "cluster.tls.key",
     .type = BT_CONF_STR,
     .offset = ROW(cluster_tls_key),
     .doc = "File (PEM, mode 0600 or 0640, no passphrase) of the certificate's private key.",
     .when = "together with cluster.tls.ca."},
    {.key = "cluster.tls.revoked",
     .type = BT_CONF_STR,
     .offset = ROW(cluster_tls_revoked),
     .doc = "File with the revoked certificates, one a line: sha256:FINGERPRINT or "
            "serial:NUMBER (`baton-certs revoke`). Daemons read it again within seconds.",
     .when = "together with cluster.tls.ca."},
    {.key = "etcd.endpoints",
     .type = BT_CONF_LIST,
     .offset = ROW(etcd_endpoints),
     .def = "127.0.0.1:2379",
     .doc = "Addresses of the etcd cluster, tried in turn: host:port, or https://host:port for "
            "TLS.",
     .when = "when etcd runs on other machines; name all its members."},
    {.key = "etcd.tls.ca",
     .type = BT_CONF_STR,
     .offset = ROW(etcd_tls_ca),
     .doc = "File (PEM) of the CA of etcd's certificates, which must name the hosts in "
            "etcd.endpoints. Default: cluster.tls.ca.",
     .when = "when etcd's certificates come from another CA than the daemons'."},
    {.key = "etcd.tls.cert",
     .type = BT_CONF_STR,
     .offset = ROW(etcd_tls_cert),
     .doc = "File (PEM) of the certificate shown to etcd. Default: cluster.tls.cert.",
     .when = "when etcd wants another certificate than the cluster's."},
    {.key = "etcd.tls.key",
     .type = BT_CONF_STR,
     .offset = ROW(etcd_tls_key),
     .doc = "File (PEM, mode 0600 or 0640) of the private key of etcd.tls.cert.",
     .when = "together with etcd.tls.cert."},
    {.key = "run_dir",
     .type = BT_CONF_STR,
     .offset = ROW(run_dir),
     .def = "/run/baton",
     .doc = "Directory of UNIX sockets. Workers find the kvstore of their node here.",
     .when = "when two clusters run on one machine, or without root rights."},
    {.key = "model.path",
     .type = BT_CONF_STR,
     .offset = ROW(model_path),
     .required = true,
     .doc = "Model directory in Hugging Face form (config.json, *.safetensors, "
            "tokenizer.json). All daemons need the same contents.",
     .when = "always set it."},
    {.key = "model.served_name",
     .type = BT_CONF_STR,
     .offset = ROW(model_served_name),
     .doc = "Name of the model in the API, metrics, status and logs. The same in all daemons. "
            "Default: the last part of model.path.",
     .when = "when clients ask for the model by another name than its directory's."},
    {.key = "model.load_format",
     .type = BT_CONF_STR,
     .offset = ROW(model_load_format),
     .def = "auto",
     .hidden = true,
     .doc = "auto reads the weights; dummy makes random ones of the configuration's shape."},
    {.key = "model.activations",
     .type = BT_CONF_STR,
     .offset = ROW(model_activations),
     .def = "bf16-mlp",
     .doc = "Precision of activations in the CPU engine: split (two bf16 parts), or bf16-mlp "
            "(one bf16 in gate, up and down; prompts are a quarter faster, logprobs differ by "
            "up to 0.07 instead of 0.015). The same in all daemons.",
     .when = "set split when the CPU engine's logprobs must be as exact as possible."},
    {.key = "model.quantize",
     .type = BT_CONF_STR,
     .offset = ROW(model_quantize),
     .def = "none",
     .doc = "none: as in the checkpoint. fp8: the matrices of all layers become e4m3 while they "
            "are loaded, with a scale for each block of 128 x 128. On Hopper GPUs models (not "
            "GPT-2) then take half the memory, and steps 0.65 to 0.94 of the time; elsewhere the "
            "values are kept in 16 bits. Refused for fp8 checkpoints. The same in all daemons.",
     .when = "when a 16-bit model is too large or too slow and tolerates fp8."},
    {.key = "engine.deterministic",
     .type = BT_CONF_BOOL,
     .offset = ROW(engine_deterministic),
     .def = "false",
     .doc = "true: a token has the same bits whatever else is computed or cached, on every "
            "worker. The CPU engine always does so with AVX512. On Hopper GPUs (f16 KV; not "
            "GPT-2) models like Llama take 1.1 to 1.3 times as long; with latent attention "
            "steps take up to 1.4 times, prompts 2.4 times. An engine that cannot do it refuses. "
            "The same in all daemons, and the same engine in all workers.",
     .when = "when outputs of a GPU must repeat bit for bit, for tests or for training."},
    {.key = "model.kv_dtype",
     .type = BT_CONF_STR,
     .offset = ROW(model_kv_dtype),
     .def = "f16",
     .doc =
         "Format of stored keys and values: f16, or fp8 (e4m3 with power-of-two scales). With keys "
         "and values: a scale for each token and head, half the memory and traffic; cuda engine "
         "only. With latents (MLA): a scale for 128 values, RoPE's part in bf16, 0.57 times the "
         "memory; both engines. The same in all daemons.",
     .when = "when KV memory or traffic limits the load and the model tolerates fp8."},
    {.key = "model.mtp",
     .type = BT_CONF_BOOL,
     .offset = ROW(model_mtp),
     .def = "false",
     .doc =
         "true: engines load the checkpoint's MTP layer (DeepSeek V3 and its relatives), so that "
         "worker.speculate may be mtp. The layer keeps KV as the others do: one layer more in "
         "memory, on SSDs and on the network; a prompt also takes as long as with almost one "
         "layer more. CPU engine only. The same in all daemons.",
     .when = "when decode workers are to take drafts of the MTP layer."},
    {.key = "kv.block_tokens",
     .type = BT_CONF_INT,
     .offset = ROW(kv_block_tokens),
     .def = "64",
     .min = 1,
     .max = 1024,
     .doc = "Tokens of a KV block and of an engine page. A power of two, the same in all daemons.",
     .when = "set 16 for small models on CPUs, where short prompts are to share prefixes."},
    {.key = "kv.flow_chunk_tokens",
     .type = BT_CONF_INT,
     .offset = ROW(kv_flow_chunk_tokens),
     .def = "512",
     .min = 1,
     .max = 1048576,
     .hidden = true,
     .doc = "Tokens whose KV of one layer moves as one item of a flow; a multiple of "
            "kv.block_tokens (at least one block), the same in all daemons. 512 tokens of a layer "
            "of Llama 3.1 8B are 2 MiB: large enough for the network's full rate, small enough to "
            "send while the next layer is computed. Tests set it to get many items from short "
            "prompts."},
    {.key = "kv.salt_file",
     .type = BT_CONF_STR,
     .offset = ROW(kv_salt_file),
     .doc = "File with the cluster's secret, which salts the block keys of each tenant. The "
            "same in all daemons. Without it the secret is empty.",
     .when = "set it when tenants must not learn from response times what others have asked."},
    {.key = "rpc.listen",
     .type = BT_CONF_ADDR,
     .offset = ROW(rpc_listen),
     .def = "127.0.0.1:0",
     .doc = "host:port of this daemon's gRPC server; port 0 takes any free one.",
     .when = "set this node's address as soon as the cluster has two nodes."},
    {.key = "rpc.advertise",
     .type = BT_CONF_ADDR,
     .offset = ROW(rpc_advertise),
     .doc = "host:port that other daemons dial. Default: the address of rpc.listen.",
     .when = "when rpc.listen is 0.0.0.0, or behind address translation."},
    {.key = "http.listen",
     .type = BT_CONF_ADDR,
     .offset = ROW(http_listen),
     .def = "127.0.0.1:0",
     .doc = "host:port of /health and /metrics (of a conductor: conductor.http.listen).",
     .when = "when Prometheus or a health check comes from another machine."},
    {.key = "log.level",
     .type = BT_CONF_STR,
     .offset = ROW(log_level),
     .def = "info",
     .reload = true,
     .doc = "error, warn, info or debug.",
     .when = "set debug while you look for a fault."},
    {.key = "log.format",
     .type = BT_CONF_STR,
     .offset = ROW(log_format),
     .def = "logfmt",
     .doc = "logfmt or json.",
     .when = "set json when the log goes to a program that wants it."},
};
const size_t bt_conf_common_len = BT_ARRAY_LEN(bt_conf_common_rows);
