"""The configuration file written on the first start, and the directories around it.  Protocol 07, 1 and 2.7."""

from __future__ import annotations

from typing import Final

DEFAULT_CONFIG: Final = """\
# Configuration of this node. It was written on the first start; change what
# you like and restart the node. Lines that begin with '#' have no effect.
#
# A value that contains '#' or a comma must stand in quotes:
#     passphrase = "one, two # three"


[reticulum]

# Let the other programs on this computer use the interfaces of this node.
# This version cannot do that yet; other implementations read the same file.
share_instance = yes

# Programs find the shared node by this name. Change it to run several nodes
# with different configurations on one computer.
instance_name = default

# Pass traffic on for others? Say yes on machines that are always on and well
# connected, and leave it off on laptops and telephones. This version cannot
# do it yet.
enable_transport = no


[logging]

# 0 critical, 1 errors, 2 warnings, 3 notices, 4 information, 5 verbose,
# 6 and more: debugging.
loglevel = 4


[interfaces]

# Each [[name]] below is one connection to the network. None is enabled yet:
# take away the '#' in front of one of the examples and put in your own
# addresses, or add sections of your own.

# Connect to another node over the Internet or a local network. If it is not
# reachable the node keeps trying.
#
# [[Upstream]]
#     type = TCPClientInterface
#     enabled = yes
#     target_host = node.example.org
#     target_port = 4242

# Let other nodes connect to this one. 0.0.0.0 listens on all addresses of this
# computer, 127.0.0.1 only for programs that run on it.
#
# [[Door]]
#     type = TCPServerInterface
#     enabled = yes
#     listen_ip = 0.0.0.0
#     listen_port = 4242

# The same for many connections with much traffic; it talks to both kinds of
# section above. With `remote` in place of `listen_on` it connects instead.
#
# [[Backbone]]
#     type = BackboneInterface
#     enabled = yes
#     listen_on = 0.0.0.0
#     port = 4243

# Talk to all nodes on the local network by broadcast. The port is used for
# listening and for sending, so it is the same on all of them.
#
# [[Local network]]
#     type = UDPInterface
#     enabled = yes
#     listen_ip = 0.0.0.0
#     forward_ip = 255.255.255.255
#     port = 4244

# Only nodes with the same network name and passphrase can use an interface
# that has these two lines in its section:
#
#     network_name = our-network
#     passphrase = "a long sentence that nobody guesses"
"""

#: Directories of a configuration directory, created at every start if missing (protocol 07, section 1.1).
LAYOUT: Final = (
    "storage",
    "storage/cache",
    "storage/cache/announces",
    "storage/resources",
    "storage/identities",
    "storage/blackhole",
    "storage/ratchets",
    "interfaces",
)
