"""Taking nodes out of service: cordons, and drains that move every job off some nodes, wave by wave.

`plan` and `verdict` decide, from plain data to plain data; `fleet` takes the picture that they look at; `drains` keeps
in etcd (`record`) what must outlive a coordinator; `running` carries it out.
"""
