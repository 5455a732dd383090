"""The StreamTask: the only place where mailbox, network, checkpoint and operators meet."""
