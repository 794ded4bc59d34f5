/* Doctor's checks of the host itself. */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/timex.h>

#include "conductor/ctl/child.h"
#include "conductor/ctl/doctor.h"

/* Reads the first line of a file of the kernel, without its end. Returns false if there is no such
 * file. */
static bool first_line(const char *path, char *out, size_t cap)
{
    FILE *f = fopen(path, "re");
    out[0] = '\0';
    if (f == NULL) {
        return false;
    }
    bool ok = fgets(out, (int)cap, f) != NULL;
    (void)fclose(f);
    out[strcspn(out, "\n")] = '\0';
    return ok;
}

static void look_clock(struct bt_ctl_findings *f)
{
    struct timex t = {.modes = 0};
    int state = adjtimex(&t);
    if (state == TIME_ERROR || (t.status & STA_UNSYNC) != 0) {
        bt_ctl_find(f, BT_CTL_WARNING, "clock",
                    "install chrony or systemd-timesyncd; Baton itself needs no common time, but "
                    "certificates, API keys that expire, and people who compare logs do",
                    "it is not synchronised");
    } else {
        bt_ctl_find(f, BT_CTL_GOOD, "clock", NULL, "synchronised, error at most %.1f ms",
                    (double)t.maxerror / 1e3);
    }
}

static void look_huge_pages(struct bt_ctl_findings *f)
{
    char shm[200];
    if (!first_line("/sys/kernel/mm/transparent_hugepage/shmem_enabled", shm, sizeof(shm))) {
        return;
    }
    bool huge = strstr(shm, "[always]") != NULL || strstr(shm, "[within_size]") != NULL;
    bt_ctl_find(f, huge ? BT_CTL_GOOD : BT_CTL_NOTE, "huge pages",
                huge
                    ? NULL
                    : "a large slab starts faster and needs smaller page tables with them: echo "
                      "within_size > /sys/kernel/mm/transparent_hugepage/shmem_enabled, then start "
                      "the kvstore again",
                "shared memory (the slab) gets %s", huge ? "huge pages" : "pages of 4 KiB");
}

/* RDMA ports that are up. */
static void look_rdma(struct bt_ctl_findings *f)
{
    static const char root[] = "/sys/class/infiniband";
    DIR *all = opendir(root);
    size_t devices = 0;
    for (struct dirent *e; all != NULL && (e = readdir(all)) != NULL;) {
        char path[600], state[80], rate[80];
        bool up = false;
        if (e->d_name[0] == '.') {
            continue;
        }
        devices++;
        for (int port = 1; port <= 2; port++) {
            snprintf(path, sizeof(path), "%s/%.200s/ports/%d/state", root, e->d_name, port);
            if (!first_line(path, state, sizeof(state)) || strstr(state, "ACTIVE") == NULL) {
                continue;
            }
            snprintf(path, sizeof(path), "%s/%.200s/ports/%d/rate", root, e->d_name, port);
            (void)first_line(path, rate, sizeof(rate));
            bt_ctl_find(f, BT_CTL_GOOD, "RDMA", NULL, "%s port %d is up, %s", e->d_name, port,
                        rate);
            up = true;
        }
        if (!up) {
            bt_ctl_find(f, BT_CTL_WARNING, "RDMA",
                        "check cable, switch port and subnet manager: ibstat shows the state",
                        "%s has no port that is up", e->d_name);
        }
    }
    if (all != NULL) {
        (void)closedir(all);
    }
    if (devices == 0) {
        bt_ctl_find(f, BT_CTL_NOTE, "RDMA", NULL,
                    "there is no device; KV cache moves between nodes over TCP");
    }
}

/* Each line of text as a finding. */
static void lines(struct bt_ctl_findings *f, const char *what, char *text)
{
    char *save = NULL;
    for (char *line = strtok_r(text, "\n", &save); line != NULL;
         line = strtok_r(NULL, "\n", &save)) {
        bt_ctl_find(f, BT_CTL_GOOD, what, NULL, "%s", line);
    }
}

static void look_gpus(struct bt_ctl_findings *f)
{
    static const char *const query[] = {
        "nvidia-smi", "--query-gpu=index,name,driver_version,memory.total,pci.bus_id",
        "--format=csv,noheader", NULL};
    static const char *const links[] = {"nvidia-smi", "topo", "-m", NULL};
    char driver[300], *out;
    if (!first_line("/proc/driver/nvidia/version", driver, sizeof(driver))) {
        bt_ctl_find(f, BT_CTL_NOTE, "GPU", NULL,
                    "there is no NVIDIA driver; workers here use the CPU engine");
        return;
    }
    int rc = bt_ctl_child(query, 30, &out);
    if (rc == 0) {
        lines(f, "GPU", out);
    } else {
        bt_ctl_find(f, BT_CTL_FAULT, "GPU",
                    "install the driver's tools (nvidia-smi) of the same version; after an update "
                    "of the driver restart the host; dmesg | grep -i xid shows a GPU that fell off",
                    "the driver is loaded, but nvidia-smi ended with %d: %.300s", rc, out);
    }
    free(out);
    if (rc == 0 && bt_ctl_child(links, 30, &out) == 0) {
        lines(f, "GPU links", out);
        free(out);
    }
}

void bt_ctl_look_host(struct bt_ctl_findings *f)
{
    look_clock(f);
    look_huge_pages(f);
    look_rdma(f);
    look_gpus(f);
}
