"""The kvstore service: KV blocks in DRAM and on SSD that outlive the engines which computed them."""
