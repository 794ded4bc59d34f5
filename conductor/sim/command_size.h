/* baton-sim size: which models fit on which GPUs, and with how many tokens of KV. */
#ifndef BT_CONDUCTOR_SIM_COMMAND_SIZE_H
#define BT_CONDUCTOR_SIM_COMMAND_SIZE_H

/* Prints a Markdown table of n model directories, of whose files only config.json is read. Returns
 * the exit status: 0, 1 (files), 2 (arguments). */
int bt_sim_size_command(char *const *dirs, int n);

#endif
