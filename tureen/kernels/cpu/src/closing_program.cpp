#include "closing_program.h"

#include <algorithm>
#include <cstring>

namespace tureen {

namespace {

constexpr int32_t VERSION = 5;

template <class T>
void write(const std::vector<T>& items, std::string& data) {
    uint64_t count = items.size();
    data.append(reinterpret_cast<const char*>(&count), sizeof count);
    data.append(reinterpret_cast<const char*>(items.data()), count * sizeof(T));
}

void check(bool is_right) {
    if (!is_right) throw std::invalid_argument("this is no program of this version");
}

template <class T>
void read(std::vector<T>& items, const char*& data, size_t& size) {
    uint64_t count = 0;
    check(size >= sizeof count);
    std::memcpy(&count, data, sizeof count);
    data += sizeof count;
    size -= sizeof count;
    check(count <= size / sizeof(T));
    items.resize(count);
    if (count > 0) std::memcpy(items.data(), data, count * sizeof(T));
    data += count * sizeof(T);
    size -= count * sizeof(T);
}

// Nothing points out of it: it comes from another process.
void check_program(const Program& program) {
    const int64_t count = int64_t(program.code.size());
    auto is_pc = [&](int64_t pc) { return pc >= 0 && pc < count; };
    check(program.num_starts > 0 && size_t(program.num_starts) <= program.rules.size());
    check(int64_t(program.cost.size()) == count);
    for (int32_t target : program.targets) check(is_pc(target));
    for (int32_t cost : program.cost) check(cost >= 0 && cost <= NEVER);
    for (const Rule& rule : program.rules) {
        check(is_pc(rule.entry) && (rule.body == -1 || is_pc(rule.body)));
        check(rule.least >= 0 && rule.most >= -1);
    }
    const int64_t num_places = int64_t(program.from.size()) - 1;
    check(program.places.empty() || int64_t(program.places.size()) == count);
    check(program.places.empty() || int64_t(program.fewest.size()) == num_places);
    for (int32_t place : program.places) check(place >= -1 && place < num_places);
    for (int32_t items : program.fewest) check(items >= 0 && items <= NEVER);
    for (size_t at = 0; at < program.from.size(); at++) {
        check(program.from[at] >= (at == 0 ? 0 : program.from[at - 1]));
        check(size_t(program.from[at]) <= program.rests.size());
    }
    for (const Rest& rest : program.rests) {
        check(rest.tokens >= 0 && rest.tokens <= NEVER && rest.items >= 0 && rest.items <= NEVER);
    }
    for (const Instruction& i : program.code) {
        check(i.op >= BYTES && i.op <= COUNT);
        if (i.op == BYTES) check(i.x >= 0 && size_t(i.x) < program.sets.size());
        if (i.op == BYTES || i.op == CALL || i.op == COUNT) check(is_pc(i.y));
        if (i.op == SPLIT) check(i.x >= 0 && i.y >= 0 && uint64_t(i.x) + uint64_t(i.y) <= program.targets.size());
        if (i.op == CALL || i.op == LOOP || i.op == NEXT || i.op == COUNT)
            check(i.x >= 0 && size_t(i.x) < program.rules.size());
        if (i.op == LOOP || i.op == NEXT) check(program.rules[i.x].body >= 0);
        if (i.op == COUNT) check(program.place_of(i.y) >= 0);
    }
}

}  // namespace

std::string pack(const Program& program) {
    std::string data;
    write(std::vector<int32_t>{VERSION, program.num_starts}, data);
    write(program.code, data);
    write(program.targets, data);
    write(program.sets, data);
    write(program.rules, data);
    write(program.cost, data);
    write(program.places, data);
    write(program.from, data);
    write(program.rests, data);
    write(program.fewest, data);
    return data;
}

Program unpack(const char* data, size_t size) {
    Program program;
    std::vector<int32_t> head;
    read(head, data, size);
    check(head.size() == 2 && head[0] == VERSION);
    program.num_starts = head[1];
    read(program.code, data, size);
    read(program.targets, data, size);
    read(program.sets, data, size);
    read(program.rules, data, size);
    read(program.cost, data, size);
    read(program.places, data, size);
    read(program.from, data, size);
    read(program.rests, data, size);
    read(program.fewest, data, size);
    check(size == 0);
    check_program(program);
    return program;
}

}  // namespace tureen
