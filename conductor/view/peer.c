/* The request machine's data about a worker or kvstore; see peer.h. Loop thread. */
#include "conductor/view/view_priv.h"

void bt_session_facts(const struct bt_session *s, struct bt_peer_facts *out)
{
    *out = (struct bt_peer_facts){.up = bt_session_up(s),
                                  .departed = s->departed,
                                  .leaving = bt_session_leaving(s),
                                  .gives_up_prefill = (s->gives_up & BT_ROLES_PREFILL) != 0,
                                  .gives_up_decode = (s->gives_up & BT_ROLES_DECODE) != 0,
                                  .gives_up_ns = s->gives_up_ns,
                                  .pace = bt_session_pace(s),
                                  .output_ns = s->output_ns,
                                  .load_ns = s->said.at_ns,
                                  .running = s->load.running,
                                  .waiting = s->load.waiting,
                                  .slots_free = s->load.slots_free,
                                  .pages_free = s->load.pages_free,
                                  .pages_total = s->load.pages_total,
                                  .classes = &s->said.classes};
}
