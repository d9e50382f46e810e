"""A machine of several NUMA nodes, as files below a folder."""


def numa_tree(root, nodes, *, memory="0-7", gpus=None):
    """`nodes`: by number the processors, as the kernel lists them, and GiB; `gpus`: by PCI address UUID and node."""
    files = {
        "sys/devices/system/node/online": ",".join(map(str, sorted(nodes))) + "\n",
        "proc/self/status": f"Name:\tpython\nMems_allowed:\tff\nMems_allowed_list:\t{memory}\n",
    }
    for number, (cpus, gib) in nodes.items():
        files[f"sys/devices/system/node/node{number}/cpulist"] = f"{cpus}\n"
        files[f"sys/devices/system/node/node{number}/meminfo"] = (
            f"Node {number} MemTotal:       {gib * 2**20} kB\nNode {number} MemFree:   {gib * 2**19} kB\n"
        )
    for address, (uuid, node) in (gpus or {}).items():
        files[f"proc/driver/nvidia/gpus/{address}/information"] = f"Model: \t H100\nGPU UUID: \t {uuid}\n"
        files[f"sys/bus/pci/devices/{address}/numa_node"] = f"{node}\n"
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root
