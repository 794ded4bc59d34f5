/* The wire process: the transfer code over UCX in a process of its own, so that an abort inside UCX
 * takes no cache with it. Its kvstore starts it (wx_process.c) as its own executable. */
#ifndef BT_KVSTORE_WIRE_WX_CHILD_H
#define BT_KVSTORE_WIRE_WX_CHILD_H

/* The first call of main(), in every program that creates a wire (wire.h): does nothing, unless
 * this is the wire process; then it does not return. */
void bt_wx_child_main_if_asked(int argc, char **argv);

#endif
